"""Volumes and snapshots by hand: each verb makes the calls that a cluster makes."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import localtime, sleep, strftime
from typing import Any, TypeVar

import grpc
from google.protobuf.json_format import MessageToDict

from agent.cli import encryption, status, terminal
from agent.cli.adoption import Manifest
from agent.cli.encryption import Headers
from agent.core import errors, ids, sockets, tag
from agent.core.ids import VolumeId
from agent.csi import client
from agent.csi.client import Client
from agent.daemon.host import Host
from agent.requests import secret
from agent.settings.settings import Config
from agent.volumes import backing, users
from agent.volumes.activator import Activator
from agent.volumes.luks_mappings import HeaderCopies
from agent.volumes.mender import Mender
from agent.volumes.reports import Reports
from agent.volumes.tag_writer import TagWriter
from lvm import names
from lvm.active_devices import Device
from mount import luks, table
from mount.luks import Cryptsetup
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

# Of pkg/volume/csi and pkg/volume/util/subpath in kubelet, wherever its own directory is.
_KUBELETS = ("/kubernetes.io~csi/", "/plugins/kubernetes.io/", "/volume-subpaths/")
T = TypeVar("T")

# The pause between retries; each call waits some seconds for a copy by itself.
_AGAIN_SECONDS = 1.0
# More calls than any service keeps.
_EVERY_CALL = 1 << 30
# How often the progress of a repair is polled, and the codes after which it is polled again.
_LOOK_SECONDS = 2.0
_NOT_YET = (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class VolumeVerbs:
    """The verbs on one service; each prints its result. Raises CallRefused."""

    def __init__(self, caller: Client, settings: Config, host: Host) -> None:
        self.caller = caller
        self.settings = settings
        # Beside the socket, which is inside kubelet's directory as staging paths must be.
        self._staging = settings.endpoint.parent / "staging"
        self.host = host

    def create(
        self,
        name: str,
        size_bytes: int,
        parameters: Mapping[str, str],
        *,
        raw: bool,
        snapshot: str,
        volume: str,
    ) -> None:
        """Make a volume, empty or as a copy of a snapshot or volume, and wait for its contents.

        The same arguments find the same volume again. A copy with a size of 0 has its source's.
        """
        if not (size_bytes or snapshot or volume):
            raise errors.Missing("--size")
        capability = client.block() if raw else client.mounted()
        source: csi.VolumeContentSource | None = None
        if snapshot:
            source = client.of_snapshot(self.find_snapshot(snapshot).snapshot_id)
        elif volume:
            source = client.of_volume(self.find(volume).volume_id)
        made = _at_last(
            lambda: self.caller.create(
                name, size_bytes, capability, parameters=parameters, source=source
            )
        )
        print(f"{name}: {terminal.human(made.capacity_bytes)}, {made.volume_id}")

    def show_all(self, *, as_json: bool, names_only: bool) -> None:
        """Show all volumes."""
        here = self.caller.volumes_here()
        found = here.entries
        _print_absent(here.away)
        if names_only:
            print(*map(_name, found), sep="\n")
            return
        ill = {one.volume_id: one for one in self._unhealthy(found)}
        health = [ill.get(one.volume_id, csi.VolumeHealth()) for one in found]
        if as_json:
            every = zip(found, health, strict=True)
            print(_json([_volume_row(*one) | _key(one[0].volume_id, here.keys) for one in every]))
        else:
            titles = ("VOLUME", "SIZE", "GROUP", "CLASS", "ENCRYPTION", "KEY", "HEALTH")
            made = terminal.table(*titles, right=("SIZE",))
            for volume, problems in zip(found, health, strict=True):
                made.add_row(
                    _name(volume),
                    terminal.human(volume.capacity_bytes),
                    ids.group_of(volume.volume_id),
                    volume.volume_context.get("carver/class", ""),
                    volume.volume_context.get("carver/encryption", ""),
                    here.keys.get(volume.volume_id, ""),
                    "\n".join(_words(problems)),
                )
            terminal.console().print(made)

    def _unhealthy(self, found: Iterable[csi.Volume]) -> list[csi.VolumeHealth]:
        """Return the unhealthy ones; ask for each if there is no list, as a group is away."""
        try:
            return self.caller.unhealthy()
        except grpc.RpcError as error:
            if error.code() not in _NOT_YET:
                raise
        return [self.caller.volume_health(one.volume_id) for one in found]

    def show(self, name: str, *, as_json: bool) -> None:
        """Show one volume, and where it is."""
        answer = self.caller.volume(self.find(name).volume_id)
        row = _volume_row(answer.volume, self.caller.volume_health(answer.volume.volume_id))
        row["places"] = [str(one) for one in self._places(answer.volume)]
        if as_json:
            print(_json(row))
            return
        made = terminal.table("", "")
        for key, value in row.items():
            made.add_row(key, "\n".join(value) if isinstance(value, list) else str(value))
        terminal.console().print(made)

    def publish(
        self, name: str, path: str, *, read_only: bool, shared: bool, key_file: str = ""
    ) -> None:
        """Stage a volume, which formats it the first time, and have it appear at a path."""
        volume, place = self.find(name), Path(path).absolute()
        staging = self._staging / _logical(volume)
        mode = client.Mode.SINGLE_NODE_MULTI_WRITER if shared else client.Mode.SINGLE_NODE_WRITER
        capability = client.mounted(mode=mode)
        if not self.caller.confirms(volume.volume_id, capability):
            # It was made for raw block access; where something else is wrong, the call will say so.
            capability = client.block(mode)
        secrets = _secrets(key_file)
        staging.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A copy may be given a master key of its own first.
        _at_last(lambda: self.caller.stage(volume, staging, capability, secrets))
        self.caller.publish(volume, staging, place, capability, read_only=read_only)
        print(f"{name} is at {place}")

    def unpublish(self, name: str, path: str | None, *, confirmed: bool) -> None:
        """Take a volume from a path, or from all; unstage it when it is at none.

        Asks before it takes it from a path of kubelet's that was not given.
        """
        volume = self.find(name)
        staging = self._staging / _logical(volume)
        given = [Path(path).absolute()] if path else self._published(volume, staging)
        kubelets = [str(one) for one in given if any(part in f"{one}/" for part in _KUBELETS)]
        pods = [] if path else kubelets
        asked = f"Take {name} from a pod? Kubelet has it at {', '.join(pods)}"
        if pods and not confirmed and not terminal.confirmed(asked):
            raise errors.NotConfirmed(name, "unpublished")
        for place in given:
            self.caller.unpublish(volume.volume_id, place)
            print(f"{name} is no longer at {place}")
        if not self._published(volume, staging):
            self.caller.unstage(volume.volume_id, staging)
            with suppress(FileNotFoundError):
                staging.rmdir()

    def expand(self, name: str, size_bytes: int, key_file: str = "") -> None:
        """Grow a volume, and its file system if it is in use; wait until that is done."""
        volume = self.find(name)
        places = self._places(volume)
        can_expand = self.caller.can_expand()
        if not (can_expand or places):
            raise errors.NotPublished(name)
        identity = volume.volume_id
        # Read the key before anything grows: an unusable key changes nothing.
        secrets = _secrets(key_file)
        if can_expand:
            _at_last(lambda: self.caller.expand(identity, size_bytes))
        if places:
            _at_last(lambda: self.caller.node_expand(identity, places[0], size_bytes, secrets))
        grown = self.caller.volume(volume.volume_id).volume
        print(f"{name}: {terminal.human(grown.capacity_bytes)}")

    def adopt(
        self,
        path: str,
        claim: str,
        storage_class: str,
        *,
        device_class: str,
        made_by: str,
        block: bool,
        dry_run: bool,
    ) -> None:
        """Adopt GROUP/LV, and print its PersistentVolume and claim for `kubectl apply`.

        What was changed is on standard error. Raises BadField.
        """
        group, name = _group_and_name(path)
        # Before anything changes: a bad name changes nothing.
        manifest = Manifest(self.settings.driver_name, name, claim, storage_class)
        request = carver.AdoptVolumeRequest(
            group=group,
            logical_volume=name,
            device_class=device_class,
            made_by=made_by,
            block=block,
            dry_run=dry_run,
        )
        if claim:
            # On a node without Kubernetes there is none.
            request.pv, request.pvc = manifest.name, manifest.claim
            request.namespace = manifest.namespace
        answer = self.caller.adopt(request)
        _print_changes(answer, dry_run=dry_run)
        print(manifest.of(answer.volume), end="")

    def undo_adopt(self, path: str, *, dry_run: bool) -> None:
        """Take `adopt` back; raises BadField."""
        group, name = _group_and_name(path)
        request = carver.AdoptVolumeRequest(group=group, logical_volume=name, dry_run=dry_run)
        _print_changes(self.caller.undo_adopt(request), dry_run=dry_run)

    def headers(self, name: str) -> Headers:
        """The header of an encrypted volume; raises NotStaged where the volume is not active."""
        found = self.find(name)
        logical = backing.of_id(found.volume_id)
        program = Cryptsetup(self.host.run, waits_for_udev=luks.has_udev())
        copies = HeaderCopies(self.settings.header_backups, program)

        def forget_key() -> None:
            volume_groups = status.volume_groups(self.settings, self.host)
            reports = Reports(volume_groups)
            activator = Activator(volume_groups, self.host.devices, reports)
            tag_writer = TagWriter(volume_groups, Mender(volume_groups, reports, activator))
            tag_writer.replace(logical, tag.OF_KEYS, {})

        return Headers(name, self.host.kernel, self._own(name), program, copies, forget_key)

    def is_open(self, name: str) -> bool:
        """Whether an encrypted volume is open."""
        return self.host.devices.mapping(self._own(name)) is not None

    def _own(self, name: str) -> Device:
        """The logical volume's own device; raises NotStaged."""
        volume = self.find(name)
        device = self._device(volume)
        if device is None:
            logical = backing.of_id(volume.volume_id)
            where = f"{logical.group}/{logical.name}"
            remedy = f"publish it, or activate that alone: `lvchange -ay -K {where}`"
            raise errors.NotStaged(name, "its logical volume is not active", remedy)
        return device

    def _device(self, volume: csi.Volume) -> Device | None:
        logical = backing.of_id(volume.volume_id)
        return self.host.devices.find(logical.group, logical.name)

    def modify(self, name: str, parameters: Mapping[str, str]) -> None:
        """Change mutable parameters of a volume."""
        self.caller.modify(self.find(name).volume_id, parameters)
        print(f"{name}: {', '.join(f'{key}={value}' for key, value in parameters.items())}")

    def repair(self, name: str, *, pool_metadata: bool) -> None:
        """Repair a volume, and wait until it is whole."""
        volume_id = self.find(name).volume_id
        self._until_done(lambda: self.caller.repair(volume_id, pool_metadata=pool_metadata))

    def replace_disk(self, old: str, new: str, *, confirmed: bool) -> None:
        """Replace a disk, and wait until all volumes are in sync."""
        asked = f"Make {new} a disk of the group, and take {old} out of it?"
        if not confirmed and not terminal.confirmed(asked):
            raise errors.NotConfirmed(new, "taken")
        self._until_done(lambda: self.caller.replace_disk(old, new))

    @staticmethod
    def _until_done(step: Callable[[], tuple[bool, str]]) -> None:
        """Poll until done, and print each change; if interrupted, the service goes on."""
        printed = ""
        while True:
            try:
                done, message = step()
            except grpc.RpcError as error:
                if error.code() not in _NOT_YET:
                    raise
                done, message = False, error.details() or error.code().name
            if message != printed:
                print(message, flush=True)
            if done:
                return
            printed = message
            sleep(_LOOK_SECONDS)

    def delete(self, name: str, *, confirmed: bool) -> None:
        """Erase and remove a volume, if the user confirms."""
        here = self.caller.volumes_here()
        volume = _named(name, here)
        what = f"{name}, {terminal.human(volume.capacity_bytes)}"
        if claim := here.claims.get(volume.volume_id):
            what += f", which is the cluster's, of the claim {claim}"
        if not confirmed and not terminal.confirmed(f"Delete {what}, and all its data?"):
            raise errors.NotConfirmed(name)
        self.caller.delete(volume.volume_id)
        print(f"{name} is deleted")

    def take(self, volume_name: str, name: str, size: str) -> None:
        """Take a snapshot; `size` is that of its COW store, or empty for the class's."""
        volume = self.find(volume_name)
        parameters = {"size": size} if size else {}
        made = self.caller.snapshot(name, volume.volume_id, parameters)
        print(f"{name}: {volume_name} as it is now, {made.snapshot_id}")

    def show_snapshots(self, *, as_json: bool, names_only: bool) -> None:
        """Show all snapshots."""
        here = self.caller.snapshots_here()
        _print_absent(here.away)
        found = [_snapshot_row(one) | _key(one.snapshot_id, here.keys) for one in here.entries]
        if names_only:
            print(*(one["name"] for one in found), sep="\n")
        elif as_json:
            print(_json(found))
        else:
            titles = ("SNAPSHOT", "VOLUME", "TAKEN", "SIZE", "READY", "KEY")
            made = terminal.table(*titles, right=("SIZE",))
            for one in found:
                ready = "yes" if one["ready"] else "no"
                size = terminal.human(one["size_bytes"])
                key = one.get("key_generation", "")
                made.add_row(one["name"], one["volume"], one["taken"], size, ready, key)
            terminal.console().print(made)

    def drop(self, name: str, *, confirmed: bool) -> None:
        """Delete a snapshot, if the user confirms."""
        snapshot = self.find_snapshot(name)
        if not confirmed and not terminal.confirmed(f"Delete snapshot {name}?"):
            raise errors.NotConfirmed(name)
        self.caller.delete_snapshot(snapshot.snapshot_id)
        print(f"{name} is deleted")

    def show_slowest(self, most: int, method: str = "", *, as_json: bool) -> None:
        """Show the slowest of the last calls, or of those of one method, each with its steps."""
        found = self.caller.slowest_calls(_EVERY_CALL if method else most).calls
        calls = [one for one in found if method in ("", one.method)][:most]
        if as_json:
            as_dict = partial(
                MessageToDict,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            print(_json([as_dict(one) for one in calls]))
            return
        for call in calls:
            began = strftime("%H:%M:%S", localtime(call.time_seconds))
            about = f" {call.volume}" if call.volume else ""
            print(f"{began} {call.method}{about} {call.code} {_ms(call.seconds)}")
            for one in call.steps:
                after, took = _ms(one.after_seconds), _ms(one.seconds)
                print(f"  at {after}: {one.kind} {one.what} {took}")

    def find(self, name: str) -> csi.Volume:
        """The volume of that name, logical volume or id; raises NoSuchVolume, PerhapsAway."""
        return _named(name, self.caller.volumes_here())

    def find_snapshot(self, name: str) -> csi.Snapshot:
        """The snapshot of that name, logical volume or id; raises NoSuchSnapshot, PerhapsAway."""
        wanted = names.logical_volume(ids.SNAPSHOT_PREFIX, name)
        here = self.caller.snapshots_here()
        for one in here.entries:
            if name == one.snapshot_id or ids.logical_name(one.snapshot_id) in (wanted, name):
                return one
        _require_all_here("snapshot", name, here.away)
        raise errors.NoSuchSnapshot(name)

    def _places(self, volume: csi.Volume) -> list[Path]:
        """Return where the volume is mounted, the staging path included."""
        device = self._device(volume)
        if device is None:
            return []
        kernel = self.host.kernel
        used = self.host.devices.mapping(device) or device
        return [Path(one.path) for one in users.places(kernel, table.read(kernel), used)]

    def _published(self, volume: csi.Volume, staging: Path) -> list[Path]:
        return [one for one in self._places(volume) if one != staging]


@contextmanager
def connected(settings: Config, host: Host) -> Iterator[VolumeVerbs]:
    """Connect to the running service; raises NotServed, NotPermitted, CallRefused."""
    try:
        is_served = sockets.is_served(settings.endpoint)
    except PermissionError:
        what, group = f"use {settings.endpoint}", ", or as a user who may write to that socket"
        raise errors.NotPermitted(what, group) from None
    if not is_served:
        raise errors.NotServed(str(settings.endpoint))
    with Client(settings.endpoint) as caller:
        try:
            yield VolumeVerbs(caller, settings, host)
        except grpc.RpcError as error:
            raise errors.CallRefused(error.code().name, error.details() or "") from None


def _at_last(call: Callable[[], T]) -> T:
    """Retry while the service works on it, and print its progress, or what keeps it from going on.

    A lasting error is printed once, as long as it is the same.
    """
    printed = ""
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.ABORTED:
                raise
            if (message := error.details() or "") != printed:
                print(message, file=sys.stderr)
            printed = message
            sleep(_AGAIN_SECONDS)


def _print_absent(away: Mapping[str, str]) -> None:
    """Print why a list lacks groups."""
    for group in sorted(away):
        print(away[group], file=sys.stderr)


def _named(name: str, here: carver.VolumesHereResponse) -> csi.Volume:
    """The volume of that name, logical volume or id; raises NoSuchVolume, PerhapsAway."""
    logical = names.logical_volume(ids.VOLUME_PREFIX, name)
    for one in here.entries:
        if name == one.volume_id or _logical(one) in (logical, name):
            return one
    _require_all_here("volume", name, here.away)
    raise errors.NoSuchVolume(name)


def _require_all_here(what: str, name: str, away: Mapping[str, str]) -> None:
    """Raise PerhapsAway if a group that may have it is away."""
    known = VolumeId.parse(name)
    may = {one: why for one, why in away.items() if known is None or one == known.group}
    if may:
        raise errors.PerhapsAway(what, name, (why for _, why in sorted(may.items())))


def _secrets(key_file: str) -> dict[str, str]:
    """The secrets of a call, from a key file; raises BadField, NotReady."""
    if not key_file:
        return {}
    try:
        return {secret.PASSPHRASE: encryption.key_in(key_file).data.decode()}
    except UnicodeDecodeError:
        # Not raised from here: the error has the key.
        pass
    raise errors.BadField("--key-file", "is not UTF-8, and a secret of CSI's is text")


def _group_and_name(path: str) -> tuple[str, str]:
    group, slash, name = path.partition("/")
    if not (group and slash and name) or "/" in name:
        raise errors.BadField("GROUP/LV", f"{path!r} is not a group, / and a logical volume")
    return group, name


def _print_changes(answer: carver.AdoptVolumeResponse, *, dry_run: bool) -> None:
    prefix = "to do: " if dry_run else "done: "
    for one in answer.changes or ["nothing: it is so already"]:
        print(f"{prefix}{one}", file=sys.stderr)


def _logical(volume: csi.Volume) -> str:
    return ids.logical_name(volume.volume_id)


def _name(volume: csi.Volume) -> str:
    """Return a volume's name; that of its logical volume if the name was hashed."""
    return ids.readable_name(volume.volume_id)


def _volume_row(volume: csi.Volume, health: csi.VolumeHealth) -> dict[str, Any]:
    return {
        "name": _name(volume),
        "id": volume.volume_id,
        "size_bytes": volume.capacity_bytes,
        **dict(sorted(volume.volume_context.items())),
        "health": _words(health),
    }


def _words(health: csi.VolumeHealth) -> list[str]:
    """Describe each problem of a volume: status, reason, and what to do."""
    return [
        f"{csi.VolumeHealthErrorType.Name(one.status)} {one.reason}: {one.message}"
        for one in health.health_statuses
    ]


def _key(identity: str, keys: Mapping[str, str]) -> dict[str, str]:
    return {"key_generation": keys[identity]} if identity in keys else {}


def _snapshot_row(snapshot: csi.Snapshot) -> dict[str, Any]:
    name = ids.logical_name(snapshot.snapshot_id)
    return {
        "name": names.readable(ids.SNAPSHOT_PREFIX, name),
        "id": snapshot.snapshot_id,
        "volume": ids.readable_name(snapshot.source_volume_id),
        "taken": f"{snapshot.creation_time.ToDatetime():%Y-%m-%d %H:%M:%S} UTC",
        "size_bytes": snapshot.size_bytes,
        "ready": snapshot.ready_to_use,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
