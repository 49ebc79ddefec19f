"""Release claims whose node is lost for good, so that a database makes an empty volume elsewhere.

A volume is on the disks of one node, and its claim can be bound to no other. So if the node is lost
for good, the claim's pod waits for ever. A replicated database needs no more than an empty volume
on another node. With the setting `release_lost_claims`, and where the claim or its StorageClass
allows it, the controller releases the claim:

1. Set the reclaim policy of the PersistentVolume to Retain, and note the former policy, the claim
   and its owner in annotations.
2. Delete the claim, with its UID as a precondition. What made the claim makes another one: a
   StatefulSet, or the operator of a database. The PersistentVolume is kept.
3. Evict the pods that waited for the claim. CloudNativePG leaves a pod alone that waits for a claim
   that is gone (cloudnative-pg, processUnschedulableInstances, and issue 5233).
4. When another claim is in use in its place, note that the release is done. Until then no other
   claim of the same owner is released.

All state is in annotations (agent.extras.evacuation.release_notes), so a release that was cut off
goes on by reading the objects. From the first step on, no deletion of the claim deletes the data.

A claim is released if all of this holds without a break for the grace period:

- The Node object of the volume's node is deleted, and the controller has forgotten the volume by
  its own rule (agent.extras.controller.nodes, Forgotten; the setting `forget_deleted_nodes`).
- If an evacuation was moving the volume, its target does not have it: else the claim is rebound.
- A pod waits for the claim, and none that has a node uses it.
- All other claims of the owner are in use, or wait for their own release
  (agent.extras.evacuation.claim_owners).

Two controllers may run at once. They choose the same claim by the same objects, each serves the
grace period itself, and each acts only on what it read within the last minute. So they cannot
release two claims of an owner at once, unless a request is on its way for longer than a grace
period.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.daemon.extra import Extra
from agent.extras.controller.membership import Record
from agent.extras.controller.node_answers import Answers
from agent.extras.controller.nodes import Forgotten, Nodes, Refused, problem_of
from agent.extras.evacuation import release_notes
from agent.extras.evacuation.claim_owners import Choice, Claim, Lost, Namespace, Pod, Volume
from agent.extras.evacuation.evictions import Evictions, UsingPod
from agent.extras.evacuation.release_notes import ReleaseNote
from agent.extras.kubernetes.events import NORMAL, WARNING, Event, Events, Said, Subject
from agent.extras.kubernetes.objects import VOLUMES, Keep, Lists, Object, Objects, find_named
from agent.extras.transfer.move import is_receiving
from agent.work.background import PeriodicTask
from proto import carver_pb2 as carver

_log = logging.getLogger(__name__)

_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_CLAIM, _VOLUME, _CLASS = "PersistentVolumeClaim", "PersistentVolume", "StorageClass"
_RETAIN = "Retain"
# Grace period, in seconds: for so long a claim must have been the next one to release, and its
# volume forgotten, without a break.
GRACE_SECONDS = 300.0
# Seconds between two looks; and from the start of the controller to the first look, in which nodes
# enrol.
INTERVAL_SECONDS, _FIRST_SECONDS = 30.0, 60.0
# Longest time, in seconds, between two looks of one grace period. A longer one is a break: the node
# may have come and gone in it.
_LONGEST_PAUSE_SECONDS = 120.0
# Maximum age, in seconds, of what was read when a request that changes something is sent.
_FRESH_SECONDS = 60.0
# Seconds between two looks at all PersistentVolumes while no claim is to be released. In between
# they are read only after a Node was deleted.
_EVERY_SECONDS = 600.0

# Time limit, in seconds, of a call to the target of a move.
_CALL_SECONDS = 10.0
_RECEIVE_STATUS = "/carver.v2.Transfer/ReceiveStatus"

# Reasons of Events.
WAITS, KEPT, RELEASED, CANCELLED, REPLACED = (
    "ReleaseWaits",
    "KeptOnNodeLoss",
    "ReleasedOnNodeLoss",
    "ReleaseCancelled",
    "ReplacedOnNodeLoss",
)
# Where the documentation says how a release is taken back.
_PAGE = "docs/evacuation.md, Take a released claim back"


class _Grace(NamedTuple):
    """A grace period: what must stay the same (`key`), since when, and when it was last seen.

    Both times are monotonic, in seconds.
    """

    key: object
    since: float
    last: float


@dataclass
class _Look:
    """What one look found: the grace periods that go on, and the errors of namespaces.

    The key of a grace period is the namespace and the owner for a release, and the UID of the
    PersistentVolume for a release that is to be withdrawn.
    """

    began: float
    graces: dict[object, _Grace] = field(default_factory=dict)
    problems: list[errors.AgentError] = field(default_factory=list)


class LostClaims:
    """Releases claims of lost nodes, step by step, by the objects of the API server.

    Its methods wait for the API server, and raise ClusterRefused or ClusterSilent if it refuses or
    does not answer; then nothing is lost, and the next look goes on.
    """

    def __init__(
        self,
        driver_name: str,
        record: Record,
        objects: Objects,
        lists: Lists,
        why_not_lost: Callable[[Volume], str],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the clients of the API server, and how the controller says what it has forgotten.

        `record` says which Nodes exist. `why_not_lost` returns why a volume does not count as lost
        with its node; empty if it does. `clock` returns the seconds since the epoch, for
        the times in Events. `monotonic` returns the seconds of a clock that is never set, for all
        intervals.
        """
        self._driver_name, self._topology_key = driver_name, ids.topology_key(driver_name)
        self._record, self._objects, self._lists = record, objects, lists
        self._evictions = Evictions(lists, objects)
        self._why_not_lost, self._monotonic = why_not_lost, monotonic
        self._events = Events(objects, driver_name, clock)
        self._graces: dict[object, _Grace] = {}
        # The topology segments of Nodes in the last look, when all PersistentVolumes are to be read
        # again at the latest, and whether the last look found a claim that is to be released.
        self._existing = frozenset[str]()
        self._due = float("-inf")
        self._has_work = False
        # What the Events about claims that wait said, by the claims' UIDs.
        self._said = Said(monotonic)

    def look(self) -> None:
        """Look once at all claims of lost nodes, and take the steps that are due.

        An error in one namespace does not keep another from being looked at. The first error is
        raised at the end.
        """
        now, existing = self._monotonic(), self._record.segments
        is_fewer = not self._existing <= existing
        if not existing or not (is_fewer or self._has_work or now >= self._due):
            self._existing = existing
            return
        look = _Look(now)
        try:
            self._look_at_all(existing, look)
        finally:
            # Forget the graces that this look has not seen: they had a break.
            self._graces = look.graces
        self._existing, self._due = existing, now + _EVERY_SECONDS
        if look.problems:
            raise look.problems[0]

    def _look_at_all(self, existing: frozenset[str], look: _Look) -> None:
        """Look at all namespaces with claims of lost nodes, or with a release that has begun.

        PersistentVolumes are read twice, for all namespaces together: first to find the namespaces,
        and again after the claims and pods in them (Namespace says why).
        """
        self._has_work = True
        names = {
            volume.namespace
            for volume in self._read_volumes()
            if volume.namespace and (volume.segment not in existing or _is_begun(volume))
        }
        users: dict[str, tuple[Sequence[Claim], Sequence[Pod]]] = {}
        for name in sorted(names):
            with self._one_of(name, look):
                users[name] = self._read_users(name)
        volumes = self._read_volumes() if users else ()
        has_work = bool(look.problems) or any(map(_is_begun, volumes))
        for name, (claims, pods) in users.items():
            with self._one_of(name, look):
                namespace = self._namespace(name, claims, pods, volumes, existing)
                has_work |= self._look_at(name, namespace, existing, look)
        self._has_work = has_work or bool(look.problems)

    @contextmanager
    def _one_of(self, name: str, look: _Look) -> Iterator[None]:
        """Keep an error about one namespace, owner or pod, so that the others are looked at."""
        try:
            yield
        except (errors.ClusterRefused, errors.ClusterSilent) as error:
            look.problems.append(error)
        except (AttributeError, KeyError, TypeError) as error:
            problem = f"an object cannot be parsed: {type(error).__name__}: {error}"
            look.problems.append(errors.ClusterSilent(f"namespace {name}", problem))

    def _look_at(
        self, name: str, namespace: Namespace, existing: frozenset[str], look: _Look
    ) -> bool:
        """Take the steps that are due in one namespace; return whether a claim is to be released.

        The result is True also for a claim that waits.
        """
        if namespace.missing:
            problem = f"it has no claim {namespace.missing[0]}, which a PersistentVolume names"
            raise errors.ClusterSilent(f"the claims of namespace {name}", problem)
        for volume in namespace.withdrawn:
            # Wait for the grace period here, too: another controller may have looked before the
            # node came back, and be about to delete the claim. It acts on what it read within a
            # minute, and until then the data must be kept.
            with self._one_of(name, look):
                if self._is_over(volume.uid, volume.note, look):
                    self._require_fresh(look.began, name)
                    self._withdraw(name, volume)
        self._go_on(name, namespace, look)
        choices = list(namespace.choices())
        for choice in choices:
            with self._one_of(name, look):
                self._look_at_choice(name, choice, existing, look)
        return bool(choices)

    def _look_at_choice(
        self, name: str, choice: Choice, existing: frozenset[str], look: _Look
    ) -> None:
        """Release the instance of one owner that is to go next, or say what it waits for."""
        if choice.obstacle:
            self._say_wait(name, choice, f"it waits: {choice.obstacle}")
        elif why := self._why_wait(choice):
            _log.debug("namespace %s: %s waits: %s", name, choice.owner, why)
            when = "once the node has been forgotten for five minutes"
            is_moving = any(each.volume.target for each in choice.lost)
            self._say_wait(name, choice, f"it waits: {why}" if is_moving else when)
        elif self._is_over((name, choice.owner), choice.key, look):
            self._release(name, choice, existing)

    def _is_over(self, key: object, subject: object, look: _Look) -> bool:
        """Return whether a grace period is over; begin it, or let it go on, if it is not.

        It begins anew if the last look did not see it, or saw another subject.
        """
        # Take the time now: the look may have waited long for answers.
        now, grace = self._monotonic(), self._graces.get(key)
        is_same = grace is not None and grace.key == subject
        if grace is None or not is_same or now - grace.last > _LONGEST_PAUSE_SECONDS:
            grace = _Grace(subject, now, now)
        look.graces[key] = grace._replace(last=now)
        return now - grace.since >= GRACE_SECONDS

    def _require_fresh(self, began: float, name: str) -> None:
        """Raise ClusterSilent if what a change is based on was read too long ago."""
        if self._monotonic() - began > _FRESH_SECONDS:
            problem = "what it said is too old to act on"
            raise errors.ClusterSilent(f"the objects of namespace {name}", problem)

    def _why_wait(self, choice: Choice) -> str:
        """Return why one of a choice's volumes is not lost; empty if all are."""
        reasons = (self._why_not_lost(each.volume) for each in choice.lost)
        return next(filter(None, reasons), "")

    # Reading

    def _read_volumes(self) -> Sequence[Volume]:
        listing = self._lists.whole(VOLUMES, f"{_VOLUME}List", keep=self._own)
        return self._parsed(listing.items)

    def _own(self, volume: Object) -> Object:
        """Return what is kept in memory of a PersistentVolume; empty for another driver's."""
        spec = volume.get("spec") or {}
        if (spec.get("csi") or {}).get("driver") != self._driver_name:
            return {}
        metadata = volume["metadata"]
        keys = ("name", "uid", "resourceVersion", "deletionTimestamp", "annotations")
        kept = {key: metadata[key] for key in keys if key in metadata}
        return {"metadata": kept, "spec": spec, "status": volume.get("status")}

    def _parsed(self, items: Iterable[Object]) -> Sequence[Volume]:
        volumes = (Volume.of(item, self._driver_name, self._topology_key) for item in items if item)
        return [volume for volume in volumes if volume is not None]

    def _read_users(self, name: str) -> tuple[Sequence[Claim], Sequence[Pod]]:
        """Read the claims of a namespace, and then its pods."""
        claims = self._whole(name, "persistentvolumeclaims", f"{_CLAIM}List", self._of_claim)
        pods = self._whole(name, "pods", "PodList", _of_pod)
        return [Claim.of(item, self._driver_name) for item in claims], [Pod.of(pod) for pod in pods]

    def _namespace(
        self,
        name: str,
        claims: Sequence[Claim],
        pods: Sequence[Pod],
        every_volume: Sequence[Volume],
        existing: frozenset[str],
    ) -> Namespace:
        volumes = [volume for volume in every_volume if volume.namespace == name]
        classes = {volume.storage_class for volume in volumes if volume.segment not in existing}
        allowing = {class_name: self._is_allowing(class_name) for class_name in sorted(classes)}
        return Namespace(claims, pods, volumes, existing, allowing)

    def _whole(self, name: str, resource: str, kind: str, keep: Keep) -> Sequence[Object]:
        path = f"/api/v1/namespaces/{quote(name, safe='')}/{resource}"
        return self._lists.whole(path, kind, keep=keep).items

    def _of_claim(self, claim: Object) -> Object:
        """Return what is kept in memory of a claim, which its user may have made large."""
        metadata, spec, status = (claim.get(key) or {} for key in ("metadata", "spec", "status"))
        kept = _about(metadata)
        wish = release_notes.wish_key(self._driver_name)
        kept["annotations"] = _entries(metadata.get("annotations"), wish)
        kept["labels"] = _entries(metadata.get("labels"), "cnpg.io/instanceName")
        kept_spec = {"volumeName": spec.get("volumeName")}
        return {"metadata": kept, "spec": kept_spec, "status": {"phase": status.get("phase")}}

    def _is_allowing(self, name: str) -> bool:
        """Return whether a StorageClass allows that its claims are released."""
        storage_class = find_named(self._objects, _CLASSES, name, _CLASS) if name else None
        if storage_class is None or storage_class.get("provisioner") != self._driver_name:
            return False
        parameters = storage_class.get("parameters") or {}
        return any(parameters.get(key) == release_notes.YES for key in release_notes.PARAMETERS)

    # The steps of a release

    def _release(self, name: str, choice: Choice, existing: frozenset[str]) -> None:
        """Keep the PersistentVolumes of a choice, then delete its claims.

        The objects are read again, and the questions asked again, before the claims are deleted.
        Nothing is deleted if the choice is another one by then.
        """
        for each in choice.lost:
            self._keep(choice, each)
            self._tell_kept(name, choice, each)
        began = self._monotonic()
        claims, pods = self._read_users(name)
        namespace = self._namespace(name, claims, pods, self._read_volumes(), existing)
        current = next((each for each in namespace.choices() if each.key == choice.key), None)
        if current is None or current.obstacle or self._why_wait(current):
            return
        # The notes have all claims of the owner, so this fails, too, if the list lacks one by now.
        if not all(_is_kept(current, each) for each in current.lost):
            return
        for each in current.lost:
            self._require_fresh(began, name)
            self._objects.delete(_claim_path(name, each.claim.name), each.claim.uid)
            text = f"claim {name}/{each.claim.name} of lost node {each.volume.segment} is released"
            _log.warning("%s; its data are kept in %s", text, each.volume.name)
            message = (
                f"node {each.volume.segment} was deleted: the claim is deleted, so that"
                f" {choice.owner} makes an empty one. PersistentVolume {each.volume.name} is kept"
            )
            self._tell(WARNING, RELEASED, message, _claim_subject(name, each.claim))

    def _keep(self, choice: Choice, lost: Lost) -> None:
        """Have a PersistentVolume outlive its claim, and note its former policy and the release."""
        volume = lost.volume
        if _is_kept(choice, lost):
            return
        annotations = {release_notes.note_key(self._driver_name): choice.note(lost).text}
        if volume.note is None:
            annotations[release_notes.policy_key(self._driver_name)] = volume.policy
        change = {
            "spec": {"persistentVolumeReclaimPolicy": _RETAIN},
            "metadata": {"annotations": annotations},
        }
        self._objects.change(_volume_path(volume), change, volume.version)

    def _go_on(self, name: str, namespace: Namespace, look: _Look) -> None:
        """Take the steps that follow the deletion of a claim."""
        waiting: dict[str, Pod] = {}
        for volume in namespace.released:
            if (note := volume.note) is None:
                continue
            with self._one_of(name, look):
                if (claim := namespace.replacement(volume)) is not None:
                    self._end(volume, note, claim)
                else:
                    pods = self._waiting(name, namespace, volume)
                    waiting.update((pod.uid, pod) for pod in pods)
        for pod in waiting.values():
            with self._one_of(name, look):
                using = UsingPod(name, pod.name, pod.uid, pod.node, pod.is_going)
                if why := self._evictions.evict(using):
                    _log.info("pod %s cannot be evicted yet: %s", using, why)

    def _waiting(self, name: str, namespace: Namespace, volume: Volume) -> Sequence[Pod]:
        """Return the pods that waited for a claim when its release began, and that still wait.

        Empty if a claim of that name exists: a pod then waits for that one.
        """
        uids = volume.note.pods if volume.note else ()
        waiting = [
            pod
            for pod in namespace.pods
            if pod.is_waiting and pod.uid in uids and volume.claim in pod.claims
        ]
        if waiting and self._objects.find(_claim_path(name, volume.claim), _CLAIM) is not None:
            return ()
        return waiting

    def _end(self, volume: Volume, note: ReleaseNote, claim: Claim) -> None:
        """Note that a release is done: `claim` is in use in place of the released one."""
        done = ReleaseNote(note.uid, note.owner, note.instance, is_done=True)
        annotations = {release_notes.note_key(self._driver_name): done.text}
        self._objects.change(
            _volume_path(volume), {"metadata": {"annotations": annotations}}, volume.version
        )
        message = f"claim {claim.name} of {note.owner} is in use in place of {volume.claim}"
        self._tell(NORMAL, REPLACED, message, _claim_subject(volume.namespace, claim))

    def _withdraw(self, name: str, volume: Volume) -> None:
        """Give a PersistentVolume its former policy, and remove the annotations.

        Its claim was not deleted, and is not to be deleted any more.
        """
        keys = (
            release_notes.policy_key(self._driver_name),
            release_notes.note_key(self._driver_name),
        )
        change: dict[str, Any] = {"metadata": {"annotations": dict.fromkeys(keys)}}
        if volume.former_policy:
            change["spec"] = {"persistentVolumeReclaimPolicy": volume.former_policy}
        self._objects.change(_volume_path(volume), change, volume.version)
        message = f"claim {volume.claim} is not released: its node is back, or it forbids that"
        claim = Subject(_CLAIM, name, volume.claim, volume.claim_uid)
        self._tell(NORMAL, CANCELLED, message, claim)

    # Events

    def _say_wait(self, name: str, choice: Choice, when: str) -> None:
        """Write an Event on each of a choice's claims: the claim is to be released, and when."""
        for each in choice.lost:
            message = (
                f"node {each.volume.segment}, which has its data, was deleted. The claim is to be"
                f" released: {when}"
            )
            if self._said.is_due(each.claim.uid, message) and not self._tell(
                WARNING, WAITS, message, _claim_subject(name, each.claim)
            ):
                self._said.forget(each.claim.uid)

    def _tell_kept(self, name: str, choice: Choice, lost: Lost) -> None:
        volume = lost.volume
        message = (
            f"node {volume.segment} was deleted, and claim {name}/{lost.claim.name} is released for"
            f" {choice.owner}. The data are kept (Retain). If the node comes back, the claim can be"
            f" bound to them again: {_PAGE}"
        )
        self._tell(WARNING, KEPT, message, Subject(_VOLUME, "", volume.name, volume.uid))

    def _tell(self, kind: str, reason: str, message: str, subject: Subject) -> bool:
        """Write an Event; return whether it was written.

        A failure is logged, and does not end the release.
        """
        try:
            self._events.ensure(subject, Event(kind, reason, message, reason), is_new=True)
        except (errors.ClusterRefused, errors.ClusterSilent) as error:
            _log.warning("cannot write an Event on %s %s: %s", subject.kind, subject.name, error)
            return False
        return True


class LostClaimsTask(Extra):
    """The periodic background task of the controller that releases claims of lost nodes."""

    def __init__(
        self,
        driver_name: str,
        nodes: Nodes,
        record: Record,
        objects: Objects,
        lists: Lists,
    ) -> None:
        """Make the background task, which `start` starts.

        Raises BadConfig if the controller does not forget deleted nodes: then no node is ever known
        to be lost for good.
        """
        if not record.forgets:
            raise errors.BadConfig(
                "carver controller",
                "release_lost_claims",
                "needs forget_deleted_nodes: without it no node is lost for good",
            )
        self._nodes = nodes
        # The event loop that uses the nodes. It is set by `start`.
        self._loop: asyncio.AbstractEventLoop
        self._claims = LostClaims(driver_name, record, objects, lists, self._why_not_lost)
        self.task = PeriodicTask(
            "claims of lost nodes",
            self._look,
            INTERVAL_SECONDS,
            "cannot release claims of lost nodes: %s",
            first_seconds=_FIRST_SECONDS,
        )

    def start(self) -> None:
        """Start the task. This method must be called in the event loop that uses the nodes."""
        self._loop = asyncio.get_running_loop()
        self.task.start()

    def stop(self) -> None:
        """Stop the task: a look that has begun goes on, and no other look begins."""
        self.task.stop()

    def _look(self) -> None:
        try:
            self._claims.look()
        except CancelledError:
            _log.debug("a look at the claims of lost nodes was cut off")

    def _why_not_lost(self, volume: Volume) -> str:
        asking = self._ask_about(volume)
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    async def _ask_about(self, volume: Volume) -> str:
        """Return why a volume is not lost: its node is not, or another node has it by a move."""
        if (why := await self._why_not_forgotten(volume.identity)) or not volume.target:
            return why
        return await self._why_moved(volume.identity, volume.target)

    async def _why_not_forgotten(self, identity: VolumeId) -> str:
        """Ask the controller's own rule about a volume, as for a call that deletes the volume."""
        try:
            node = await self._nodes.owner(str(identity), "volume_id")
        except Forgotten:
            return ""
        except Refused as error:
            return str(error)
        return f"it is on node {node.name}"

    async def _why_moved(self, identity: VolumeId, target: str) -> str:
        """Return that the target of a move has a volume as its own; empty if it has not.

        What the target has only received it can never finish while the volume's node is gone.
        """
        node = self._nodes.get(target)
        if node is None:
            # The target was forgotten, too.
            return ""
        request = carver.NameRequest(name=ids.readable_name(str(identity)))
        data = request.SerializeToString()
        try:
            node.require_answering()
            async with asyncio.timeout(_CALL_SECONDS + 1):
                _, there = await Answers(self._nodes).of(
                    node, _RECEIVE_STATUS, request, data, _CALL_SECONDS
                )
        except (grpc.aio.AioRpcError, Refused, TimeoutError) as error:
            why = problem_of(error)
            return f"node {target}, to which it was moving, does not say whether it has it: {why}"
        if there.received != str(identity) or is_receiving({"state": there.state}):
            return ""
        return f"node {target} has it by a move: its claim is to be rebound to {there.volume_id}"


def _is_begun(volume: Volume) -> bool:
    return volume.note is not None and not volume.note.is_done


def _is_kept(choice: Choice, lost: Lost) -> bool:
    """Return whether a PersistentVolume outlives its claim, and has the note of this release."""
    return lost.volume.policy == _RETAIN and lost.volume.note == choice.note(lost)


def _claim_subject(namespace: str, claim: Claim) -> Subject:
    return Subject(_CLAIM, namespace, claim.name, claim.uid)


def _claim_path(namespace: str, name: str) -> str:
    parts = (quote(part, safe="") for part in (namespace, name))
    return "/api/v1/namespaces/{}/persistentvolumeclaims/{}".format(*parts)


def _volume_path(volume: Volume) -> str:
    return f"{VOLUMES}/{quote(volume.name, safe='')}"


def _about(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: metadata[key] for key in ("name", "uid", "deletionTimestamp") if key in metadata}
    references = [
        {key: reference.get(key) for key in ("kind", "name", "controller")}
        for reference in metadata.get("ownerReferences") or ()
    ]
    return {**kept, "ownerReferences": references}


def _entries(table: Any, key: str) -> dict[str, Any]:
    return {key: table[key]} if isinstance(table, dict) and key in table else {}


def _of_pod(pod: Object) -> Object:
    """Return what is kept in memory of a pod, which its user may have made large."""
    metadata, spec, status = (pod.get(key) or {} for key in ("metadata", "spec", "status"))
    volumes = [
        {
            "name": volume.get("name"),
            **({"ephemeral": {}} if "ephemeral" in volume else {}),
            "persistentVolumeClaim": {"claimName": reference.get("claimName")},
        }
        for volume in spec.get("volumes") or ()
        if (reference := volume.get("persistentVolumeClaim") or {}) or "ephemeral" in volume
    ]
    ready = [
        {"type": "Ready", "status": condition.get("status")}
        for condition in status.get("conditions") or ()
        if condition.get("type") == "Ready"
    ]
    return {
        "metadata": _about(metadata),
        "spec": {"nodeName": spec.get("nodeName"), "volumes": volumes},
        "status": {"phase": status.get("phase"), "conditions": ready},
    }
