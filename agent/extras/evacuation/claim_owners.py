"""Which claim of a lost node may be released next, by the objects of one namespace.

This module is a pure function of these objects, `decide`. agent.extras.evacuation.lost_claims reads
them, waits, and acts.

The *owner* of a claim is what makes the claim anew if it is deleted: the controller in the claim's
ownerReferences, or the StatefulSet of the pods that use the claim. CloudNativePG sets its Cluster
as the controller of each claim, and the labels `cnpg.io/instanceName` and `cnpg.io/pvcRole`
(cloudnative-pg, pkg/reconciler/persistentvolumeclaim). ECK sets its Elasticsearch as the controller
of the claims of several StatefulSets (cloud-on-k8s, setVolumeClaimsControllerReference).

An *instance* of an owner is the claims that one pod needs, such as data and write-ahead log. They
are released together: with one of them on a lost node the pod cannot start anywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from agent.core.ids import VolumeId
from agent.extras.evacuation import move_notes, release_notes
from agent.extras.evacuation.release_notes import ReleaseNote
from agent.extras.kubernetes.objects import Object, claims_of
from agent.extras.orphans import references

_STATEFUL_SET, _POD = "StatefulSet", "Pod"
# Label of CloudNativePG with the name of the instance that a claim belongs to. The claims for data,
# write-ahead log and tablespaces of one instance have the same.
_INSTANCE_LABEL = "cnpg.io/instanceName"


class Owner(NamedTuple):
    """The kind and the name of the object that makes claims anew; in the claims' namespace."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @classmethod
    def of(cls, metadata: Object) -> "Owner | None":
        """Return the controller in an object's ownerReferences; None without one."""
        for reference in metadata.get("ownerReferences") or ():
            if reference.get("controller"):
                return cls(str(reference.get("kind")), str(reference.get("name")))
        return None


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim.

    - `volume` is the name of the PersistentVolume that the claim names; empty if it names none.
    - `wish` is the text of the annotation that allows or forbids the release; empty without one.
    - `owner` is the controller in the ownerReferences, unless that is a pod.
    - `instance` is the instance by the label of CloudNativePG; empty without the label.
    """

    name: str
    uid: str
    volume: str
    is_bound: bool
    is_going: bool
    wish: str
    owner: Owner | None
    instance: str

    @classmethod
    def of(cls, claim: Object, driver_name: str) -> "Claim":
        """Parse a claim."""
        metadata, spec, status = (claim.get(key) or {} for key in ("metadata", "spec", "status"))
        owner = Owner.of(metadata)
        return cls(
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            volume=str(spec.get("volumeName") or ""),
            is_bound=status.get("phase") == "Bound",
            is_going="deletionTimestamp" in metadata,
            wish=_text(metadata, "annotations", release_notes.wish_key(driver_name)),
            owner=None if owner is None or owner.kind == _POD else owner,
            instance=_text(metadata, "labels", _INSTANCE_LABEL),
        )


@dataclass(frozen=True)
class Pod:
    """A pod that has not ended, and the names of the claims that it uses.

    `node` is empty for a pod that the scheduler has assigned to no node.
    """

    name: str
    uid: str
    node: str
    is_ready: bool
    is_going: bool
    claims: tuple[str, ...]
    owner: Owner | None

    @classmethod
    def of(cls, pod: Object) -> "Pod":
        """Parse a pod."""
        metadata, spec, status = (pod.get(key) or {} for key in ("metadata", "spec", "status"))
        conditions = status.get("conditions") or ()
        return cls(
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            node=str(spec.get("nodeName") or ""),
            is_ready=any(
                (condition.get("type"), condition.get("status")) == ("Ready", "True")
                for condition in conditions
            ),
            is_going="deletionTimestamp" in metadata,
            claims=tuple(dict.fromkeys(claims_of(pod))),
            owner=Owner.of(metadata),
        )

    @property
    def is_waiting(self) -> bool:
        """Whether the pod waits for a node."""
        return not self.node and not self.is_going


@dataclass(frozen=True)
class Volume:
    """A PersistentVolume of the driver that names one node.

    - `version` is the resourceVersion.
    - `segment` is the topology segment of the node.
    - `namespace`, `claim` and `claim_uid` are of the claim in `claimRef`.
    - `former_policy` is the text of the annotation `policy_key`; empty without one.
    - `is_moving` is whether a move of the volume has begun to rebind the claim.
    - `target` is the node to which an evacuation was moving the volume; empty without a move.
    - `note` is the release of the claim; None if none has begun. `is_unclear` is whether there is a
      note that cannot be parsed.
    """

    name: str
    uid: str
    version: str
    identity: VolumeId
    segment: str
    policy: str
    former_policy: str
    storage_class: str
    namespace: str
    claim: str
    claim_uid: str
    is_bound: bool
    is_going: bool
    is_moving: bool
    target: str
    note: ReleaseNote | None
    is_unclear: bool

    @classmethod
    def of(cls, volume: Object, driver_name: str, topology_key: str) -> "Volume | None":
        """Parse a PersistentVolume; None for one of another driver, or that names several nodes."""
        metadata, spec = volume.get("metadata") or {}, volume.get("spec") or {}
        source, reference = spec.get("csi") or {}, spec.get("claimRef") or {}
        identity = VolumeId.parse(str(source.get("volumeHandle")))
        segments = set(references.nodes_of(spec, topology_key))
        if source.get("driver") != driver_name or identity is None or len(segments) != 1:
            return None
        annotations = metadata.get("annotations") or {}
        note = ReleaseNote.parse(annotations, driver_name)
        return cls(
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            version=str(metadata.get("resourceVersion") or ""),
            identity=identity,
            segment=segments.pop(),
            policy=str(spec.get("persistentVolumeReclaimPolicy") or ""),
            former_policy=str(annotations.get(release_notes.policy_key(driver_name)) or ""),
            storage_class=str(spec.get("storageClassName") or ""),
            namespace=str(reference.get("namespace") or ""),
            claim=str(reference.get("name") or ""),
            claim_uid=str(reference.get("uid") or ""),
            is_bound=(volume.get("status") or {}).get("phase") == "Bound",
            is_going="deletionTimestamp" in metadata,
            is_moving=any(str(key).startswith(f"move.{driver_name}/") for key in annotations),
            target=move_notes.target_of(annotations, driver_name, str(identity)),
            note=note,
            is_unclear=note is None and release_notes.note_key(driver_name) in annotations,
        )


def _text(metadata: Object, table: str, key: str) -> str:
    entries = metadata.get(table)
    return str(entries.get(key) or "") if isinstance(entries, dict) else ""


@dataclass(frozen=True)
class Lost:
    """A claim, and its PersistentVolume, which names a node that has no Node object."""

    claim: Claim
    volume: Volume


@dataclass(frozen=True)
class Choice:
    """The one instance of an owner that is to be released next.

    - `lost` are the instance's claims on lost nodes, sorted by name.
    - `waiting` are the pods that wait for these claims.
    - `known` has the UIDs of all claims that the owner had before the first claim of the instance
      was deleted.
    - `obstacle` is why the claims may not be released now; empty if they may. It is a clause whose
      subject is in it, such as "claim data-db-1 … is not in use".
    """

    owner: Owner
    instance: str
    lost: tuple[Lost, ...]
    waiting: tuple[Pod, ...]
    known: tuple[str, ...]
    obstacle: str = ""

    def note(self, lost: Lost) -> ReleaseNote:
        """The note about the release of one of the choice's claims."""
        pods = tuple(sorted(pod.uid for pod in self.waiting))
        return ReleaseNote(lost.claim.uid, str(self.owner), self.instance, self.known, pods)

    @property
    def key(self) -> object:
        """What must be the same for the whole grace period: the owner, the instance, the claims."""
        return self.owner, self.instance, tuple(lost.claim.uid for lost in self.lost)


class Namespace:
    """The claims, pods and PersistentVolumes of one namespace, all read in one look.

    The claims must be read first, then the pods, then the PersistentVolumes: a claim that another
    controller released is then missing, or its PersistentVolume has a note.
    """

    def __init__(
        self,
        claims: Sequence[Claim],
        pods: Sequence[Pod],
        volumes: Sequence[Volume],
        existing: frozenset[str],
        allowing: Mapping[str, bool],
    ) -> None:
        """Set the objects.

        `volumes` are the PersistentVolumes whose claimRef is in the namespace. `existing` has all
        names and topology segments of Nodes. `allowing` says of StorageClasses, by name, whether
        their claims may be released.
        """
        self.claims, self.pods, self.volumes = claims, pods, volumes
        self._existing, self._allowing = existing, allowing
        self._volumes = {volume.name: volume for volume in volumes}

    @cached_property
    def _templates(self) -> Mapping[str, frozenset[str]]:
        """The names of the claim templates of each StatefulSet, by the StatefulSet's name.

        They follow from the pods: a claim of a StatefulSet's pod is called TEMPLATE-SET-ORDINAL.
        """
        templates: dict[str, frozenset[str]] = {}
        for pod in self.pods:
            name = _set_of(pod)
            for claim in pod.claims if name else ():
                if claim.endswith(f"-{pod.name}"):
                    template = claim.removesuffix(f"-{pod.name}")
                    templates[name] = templates.get(name, frozenset()) | {template}
        return templates

    def _pod_of_set(self, claim: str) -> tuple[str, str]:
        """Return the StatefulSet of a claim, and the pod of the StatefulSet that needs the claim.

        All are names; empty for a claim that no StatefulSet makes. The claim and the pod need not
        exist.
        """
        for name, templates in self._templates.items():
            for template in templates:
                prefix = f"{template}-{name}-"
                ordinal = claim.removeprefix(prefix)
                if claim.startswith(prefix) and _is_ordinal(ordinal):
                    return name, f"{name}-{ordinal}"
        return "", ""

    @cached_property
    def _members(self) -> Mapping[Owner, Mapping[str, Sequence[Claim]]]:
        """The claims of each owner, by the names of the owner's instances."""
        members: dict[Owner, dict[str, list[Claim]]] = {}
        for claim in sorted(self.claims, key=lambda claim: claim.name):
            set_name, pod_name = self._pod_of_set(claim.name)
            owner = claim.owner or (Owner(_STATEFUL_SET, set_name) if set_name else None)
            if owner is None:
                continue
            users = sorted(pod.name for pod in self._users(claim))
            instance = pod_name or claim.instance or next(iter(users), claim.name)
            members.setdefault(owner, {}).setdefault(instance, []).append(claim)
        return members

    def _users(self, claim: Claim) -> Sequence[Pod]:
        return [pod for pod in self.pods if claim.name in pod.claims]

    def _is_in_use(self, claim: Claim) -> bool:
        """Return whether a claim is bound, and a pod that is ready uses it on an existing Node."""
        return (
            claim.is_bound
            and not claim.is_going
            and any(
                pod.is_ready and not pod.is_going and pod.node in self._existing
                for pod in self._users(claim)
            )
        )

    def lost(self, claim: Claim) -> Lost | None:
        """Return a claim that has its PersistentVolume on a lost node; else None.

        None also if the claim is being deleted, or if the PersistentVolume is of another claim.
        """
        volume = self._volumes.get(claim.volume)
        if volume is None or claim.is_going or not claim.is_bound:
            return None
        is_own = (volume.claim, volume.claim_uid) == (claim.name, claim.uid)
        is_lost = bool(self._existing) and volume.segment not in self._existing
        return Lost(claim, volume) if is_own and is_lost else None

    def allows(self, lost: Lost) -> bool:
        """Return whether the claim, or else its StorageClass, allows the release."""
        if lost.claim.wish:
            return lost.claim.wish == release_notes.YES
        return self._allowing.get(lost.volume.storage_class, False)

    @property
    def missing(self) -> Sequence[str]:
        """The names of claims that bound PersistentVolumes name, and that the list does not have.

        A list of claims from which some are missing must not hide that they are not in use. A claim
        whose release has begun may be missing.
        """
        uids = {claim.uid for claim in self.claims}
        return [
            volume.claim
            for volume in self.volumes
            if volume.is_bound and volume.note is None and volume.claim_uid not in uids
        ]

    # Releases that have begun

    def unfinished(self, owner: Owner) -> Sequence[Volume]:
        """The PersistentVolumes of an owner's claims whose release has begun and is not done."""
        return [
            volume
            for volume in self.volumes
            if volume.note is not None
            and volume.note.owner == str(owner)
            and not volume.note.is_done
        ]

    @property
    def released(self) -> Sequence[Volume]:
        """The PersistentVolumes whose claim was deleted for a release that is not done."""
        uids = {claim.uid for claim in self.claims}
        return [
            volume
            for volume in self.volumes
            if volume.note and not volume.note.is_done and volume.note.uid not in uids
        ]

    def replacement(self, volume: Volume) -> Claim | None:
        """Return the claim that is in use in place of a released one; None while there is none.

        A StatefulSet makes a claim of the same name. Other owners may choose another name: then any
        claim counts that the owner made since the release began. None also while another claim of
        the same instance is still to be deleted: its note must have the same claims as this one's.
        """
        if (note := volume.note) is None:
            return None
        released = {each.name for each in self.released}
        for each in self.volumes:
            other = each.note
            is_same = other and (other.owner, other.instance) == (note.owner, note.instance)
            if other and is_same and not other.is_done and each.name not in released:
                return None
        is_of_set = any(self._pod_of_set(volume.claim))
        for owner, instances in self._members.items():
            for claims in instances.values() if str(owner) == note.owner else ():
                for claim in claims:
                    is_new = claim.uid not in (*note.known, note.uid)
                    is_named = claim.name == volume.claim or not is_of_set
                    if is_new and is_named and self._is_in_use(claim):
                        return claim
        return None

    @property
    def withdrawn(self) -> Sequence[Volume]:
        """The PersistentVolumes whose claim is still there, and is not to be released any more.

        Their release had begun. Either their node has come back, or the claim forbids the release.
        """
        claims = {claim.uid: claim for claim in self.claims}
        found = []
        for volume in self.volumes:
            claim = claims.get(volume.note.uid) if volume.note and not volume.note.is_done else None
            if claim is not None and not claim.is_going and self._existing:
                is_back = volume.segment in self._existing
                if is_back or not self.allows(Lost(claim, volume)):
                    found.append(volume)
        return found

    # The next release of each owner

    def choices(self) -> Iterator[Choice]:
        """Yield, for each owner with a claim on a lost node, the instance that is to go next.

        The choice depends on nothing but the objects, so two controllers that read the same objects
        choose the same instance:

        1. An instance whose release has begun goes on.
        2. Otherwise it is the first instance, by name, that a pod waits for and whose claims on
           lost nodes may all be released.
        """
        for owner, instances in sorted(self._members.items()):
            begun = {
                volume.note.instance for volume in self.unfinished(owner) if volume.note is not None
            }
            candidates = [
                self._choice(owner, instance)
                for instance, claims in sorted(instances.items())
                if any(map(self.lost, claims))
            ]
            candidates.sort(key=lambda choice: choice.instance not in begun)
            for choice in candidates:
                is_allowed = all(map(self.allows, choice.lost))
                if is_allowed and (choice.waiting or choice.instance in begun):
                    yield choice
                    break

    def _choice(self, owner: Owner, instance: str) -> Choice:
        claims = self._members[owner][instance]
        lost = tuple(filter(None, map(self.lost, claims)))
        names = {each.claim.name for each in lost}
        users = [pod for pod in self.pods if not names.isdisjoint(pod.claims)]
        choice = Choice(
            owner,
            instance,
            lost,
            tuple(pod for pod in users if pod.is_waiting),
            self._known(owner, instance),
        )
        return replace(choice, obstacle=self._obstacle(choice, users))

    def _known(self, owner: Owner, instance: str) -> tuple[str, ...]:
        """The UIDs of all claims that the owner had before a claim of the instance was deleted.

        If one was deleted already, its note has them: since then the owner may have made others.
        """
        claims = [claim for others in self._members[owner].values() for claim in others]
        uids = {claim.uid for claim in claims}
        for volume in self.unfinished(owner):
            note = volume.note
            if note is not None and note.instance == instance and note.uid not in uids:
                return note.known
        return tuple(sorted(uids))

    def _obstacle(self, choice: Choice, users: Sequence[Pod]) -> str:
        """Return why a choice's claims may not be released now; empty if they may."""
        for each in choice.lost:
            volume = each.volume
            if volume.is_moving or volume.is_going or volume.is_unclear:
                why = "is being deleted" if volume.is_going else "has annotations of another change"
                return f"PersistentVolume {volume.name} {why}"
            if volume.note is not None and volume.note.uid != each.claim.uid:
                return f"PersistentVolume {volume.name} has the note of another claim's release"
        for pod in users:
            if pod.node:
                return f"pod {pod.name} uses the claim on node {pod.node}"
            for claim in self.claims:
                other = self.lost(claim) if claim.name in pod.claims else None
                if other is not None and other not in choice.lost:
                    return (
                        f"pod {pod.name} needs claim {claim.name}, too, which is on a lost node and"
                        f" of another owner than {choice.owner}"
                    )
        return self._obstacle_by_others(choice)

    def _obstacle_by_others(self, choice: Choice) -> str:
        """Return why the owner's other claims forbid the release; empty if they do not.

        Each other instance's claim must be in use, or be on a lost node and wait for its turn. At
        least one must be in use: otherwise the owner would begin with no data at all.
        """
        for volume in self.unfinished(choice.owner):
            if volume.note is not None and volume.note.instance != choice.instance:
                return (
                    f"claim {volume.claim} of {choice.owner} was released, and no claim is in use"
                    " in its place yet"
                )
        others = {
            instance: claims
            for instance, claims in self._members[choice.owner].items()
            if instance != choice.instance
        }
        for claims in others.values():
            for claim in claims:
                lost = self.lost(claim)
                waits = lost is not None and self.allows(lost)
                if not waits and not self._is_in_use(claim):
                    return f"claim {claim.name} of {choice.owner} is not in use by a ready pod"
        if others and not any(
            self._is_in_use(claim) for claims in others.values() for claim in claims
        ):
            return f"no claim of {choice.owner} is in use: there is no copy to begin with"
        return ""


def _set_of(pod: Pod) -> str:
    """Return the name of the StatefulSet that made a pod; empty for another pod."""
    owner = pod.owner
    if owner is None or owner.kind != _STATEFUL_SET:
        return ""
    return owner.name if _is_ordinal(pod.name.removeprefix(f"{owner.name}-")) else ""


def _is_ordinal(text: str) -> bool:
    return text.isascii() and text.isdigit()
