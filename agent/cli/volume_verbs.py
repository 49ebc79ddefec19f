"""Subcommands of `carver volume`, `snapshot` and `group`: CSI calls as a cluster makes them."""

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
from agent.cli.encryption import Headers
from agent.cli.volume_manifest import Manifest
from agent.core import errors, ids, sockets, tag
from agent.core.ids import VolumeId
from agent.csi import client
from agent.csi.client import Client
from agent.daemon.host import Host
from agent.requests import secret
from agent.requests.parameters import PREFIX
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

# Parts of the paths at which kubelet publishes volumes, whatever kubelet's root directory is; see
# pkg/volume/csi and pkg/volume/util/subpath of Kubernetes.
_KUBELETS = ("/kubernetes.io~csi/", "/plugins/kubernetes.io/", "/volume-subpaths/")
T = TypeVar("T")

# Pause, in seconds, before a call that the service could not finish yet is repeated. The service
# itself waits some seconds, within the call, for a copy.
_AGAIN_SECONDS = 1.0
# Number of calls to ask the service for when all calls are needed: more than any service keeps.
_EVERY_CALL = 1 << 30
# Interval, in seconds, at which the progress of a repair or of a disk's replacement is polled.
_LOOK_SECONDS = 2.0
# gRPC codes of errors after which a call may succeed later.
_NOT_YET = (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class VolumeVerbs:
    """The subcommands of `carver` that call the running service; each prints its own result.

    A subcommand raises an error of the service as grpc.RpcError, which `connect` turns into
    CallRefused.
    """

    def __init__(self, caller: Client, settings: Config, host: Host) -> None:
        self.caller = caller
        self.settings = settings
        # Directory of the staging paths. It is beside the CSI socket, and so below kubelet's
        # directory, where staging paths must be.
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
        """Create a volume, empty or as a copy of a snapshot or volume, and wait for its contents.

        A repeated call with the same arguments finds the same volume. For a copy a `size_bytes` of
        0 means the size of the source.
        """
        if not (size_bytes or snapshot or volume):
            raise errors.Missing("--size")
        capability = client.block() if raw else client.mounted()
        source: csi.VolumeContentSource | None = None
        if snapshot:
            source = client.of_snapshot(self.find_snapshot(snapshot).snapshot_id)
        elif volume:
            source = client.of_volume(self.find(volume).volume_id)
        created = _retry_while_aborted(
            lambda: self.caller.create(
                name, size_bytes, capability, parameters=parameters, source=source
            )
        )
        print(f"{name}: {terminal.human(created.capacity_bytes)}, {created.volume_id}")

    def show_all(self, *, as_json: bool, names_only: bool) -> None:
        """Print all volumes with their health: as a table, as JSON, or only their names."""
        listing = self.caller.volumes_here()
        volumes = listing.entries
        _print_absent(listing.away)
        if names_only:
            print(*map(_name, volumes), sep="\n")
            return
        unhealthy = {health.volume_id: health for health in self._unhealthy(volumes)}
        healths = [unhealthy.get(volume.volume_id, csi.VolumeHealth()) for volume in volumes]
        if as_json:
            pairs = zip(volumes, healths, strict=True)
            print(
                _json(
                    [_volume_row(*pair) | _key(pair[0].volume_id, listing.keys) for pair in pairs]
                )
            )
        else:
            titles = ("VOLUME", "SIZE", "GROUP", "CLASS", "ENCRYPTION", "KEY", "HEALTH")
            grid = terminal.table(*titles, right=("SIZE",))
            for volume, health in zip(volumes, healths, strict=True):
                grid.add_row(
                    _name(volume),
                    terminal.human(volume.capacity_bytes),
                    ids.group_of(volume.volume_id),
                    volume.volume_context.get("carver/class", ""),
                    volume.volume_context.get("carver/encryption", ""),
                    listing.keys.get(volume.volume_id, ""),
                    "\n".join(_words(health)),
                )
            terminal.console().print(grid)

    def _unhealthy(self, listed_volumes: Iterable[csi.Volume]) -> list[csi.VolumeHealth]:
        """Return the health of the volumes that have a health condition.

        If the service gives no list of these volumes, as when a volume group is missing, each
        volume of `listed_volumes` is queried.
        """
        try:
            return self.caller.unhealthy()
        except grpc.RpcError as error:
            if error.code() not in _NOT_YET:
                raise
        return [self.caller.volume_health(volume.volume_id) for volume in listed_volumes]

    def show(self, name: str, *, as_json: bool) -> None:
        """Print one volume, its health, and the paths at which it is mounted."""
        answer = self.caller.volume(self.find(name).volume_id)
        row = _volume_row(answer.volume, self.caller.volume_health(answer.volume.volume_id))
        row["places"] = [str(path) for path in self._places(answer.volume)]
        if as_json:
            print(_json(row))
            return
        grid = terminal.table("", "")
        for key, value in row.items():
            grid.add_row(key, "\n".join(value) if isinstance(value, list) else str(value))
        terminal.console().print(grid)

    def publish(
        self, name: str, path: str, *, read_only: bool, shared: bool, key_file: str = ""
    ) -> None:
        """Stage and publish a volume at a path; the first time, staging formats the volume."""
        volume, place = self.find(name), Path(path).absolute()
        staging = self._staging / _logical(volume)
        mode = client.Mode.SINGLE_NODE_MULTI_WRITER if shared else client.Mode.SINGLE_NODE_WRITER
        capability = client.mounted(mode=mode)
        if not self.caller.confirms(volume.volume_id, capability):
            # Assume a raw block volume, as the volume cannot be mounted; staging reports other
            # problems.
            capability = client.block(mode)
        secrets = _secrets(key_file)
        staging.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Repeat staging while the service is not ready, for example while mkfs runs.
        _retry_while_aborted(lambda: self.caller.stage(volume, staging, capability, secrets))
        self.caller.publish(volume, staging, place, capability, read_only=read_only)
        print(f"{name} is at {place}")

    def unpublish(self, name: str, path: str | None, *, confirmed: bool) -> None:
        """Unpublish a volume from a path, or from all; unstage the volume once no path is left.

        Without a path, the user is asked before the volume is unpublished from paths of kubelet's,
        that is from a pod.
        """
        volume = self.find(name)
        staging = self._staging / _logical(volume)
        targets = [Path(path).absolute()] if path else self._published(volume, staging)
        kubelets = [
            str(target) for target in targets if any(part in f"{target}/" for part in _KUBELETS)
        ]
        pods = [] if path else kubelets
        question = f"Take {name} from a pod? Kubelet has it at {', '.join(pods)}"
        if pods and not confirmed and not terminal.confirmed(question):
            raise errors.NotConfirmed(name, "unpublished")
        for place in targets:
            self.caller.unpublish(volume.volume_id, place)
            print(f"{name} is no longer at {place}")
        if not self._published(volume, staging):
            self.caller.unstage(volume.volume_id, staging)
            with suppress(FileNotFoundError):
                staging.rmdir()

    def expand(self, name: str, size_bytes: int, key_file: str = "") -> None:
        """Grow a volume, and a mounted file system on the volume, and wait until both are grown.

        Raises NotPublished if the volume can grow only in use, and is mounted nowhere.
        """
        volume = self.find(name)
        places = self._places(volume)
        can_expand = self.caller.can_expand()
        if not (can_expand or places):
            raise errors.NotPublished(name)
        identity = volume.volume_id
        # Read the key before the volume grows, so that an unusable key changes nothing.
        secrets = _secrets(key_file)
        if can_expand:
            _retry_while_aborted(lambda: self.caller.expand(identity, size_bytes))
        if places:
            _retry_while_aborted(
                lambda: self.caller.node_expand(identity, places[0], size_bytes, secrets)
            )
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
        """Adopt a logical volume, and print its PersistentVolume and claim for `kubectl apply`.

        `path` is GROUP/LV. The changes are printed to standard error. Raises BadField for a bad
        path or a bad name of claim or storage class.
        """
        group, name = _group_and_name(path)
        # Check the names of claim and storage class before the service changes anything.
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
            # Send the claim only if the user named one: a node without Kubernetes has no claims.
            request.pv, request.pvc = manifest.name, manifest.claim
            request.namespace = manifest.namespace
        answer = self.caller.adopt(request)
        _print_changes(answer, dry_run=dry_run)
        print(manifest.of(answer.volume), end="")

    def undo_adopt(self, path: str, *, dry_run: bool) -> None:
        """Undo the adoption of the logical volume `path`; raises BadField unless it is GROUP/LV."""
        group, name = _group_and_name(path)
        request = carver.AdoptVolumeRequest(group=group, logical_volume=name, dry_run=dry_run)
        _print_changes(self.caller.undo_adopt(request), dry_run=dry_run)

    def show_manifest(self, name: str, claim: str, storage_class: str) -> None:
        """Print the PersistentVolume and claim of an existing volume for `kubectl apply`.

        Standard error says what the volume's tags lack.

        `claim` is NAMESPACE/NAME; empty for the claim that the volume was made for, if that is
        recorded. Raises BadField for a bad name of claim or storage class.
        """
        listing = self.caller.volumes_here()
        volume = _find_named(name, listing)
        claim = claim or listing.claims.get(volume.volume_id, "")
        recorded_name = listing.persistent_volumes.get(volume.volume_id, "")
        manifest = Manifest(
            self.settings.driver_name, _logical(volume), claim, storage_class, recorded_name
        )
        capabilities = listing.capabilities[volume.volume_id].entries
        if not capabilities:
            print(
                f"{name}: its access modes and mount options are not recorded: compare accessModes"
                " and mountOptions with what its pods need",
                file=sys.stderr,
            )
        if volume.volume_context.get(f"{PREFIX}{tag.ENCRYPTION}"):
            note = (
                "name its key's Secret in csi.nodeStageSecretRef, unless its class has a key_file"
            )
            print(f"{name} is encrypted: {note}", file=sys.stderr)
        print(manifest.of(volume, capabilities), end="")

    def headers(self, name: str) -> Headers:
        """The commands on an encrypted volume's header; raises NotStaged for an inactive volume."""
        volume = self.find(name)
        logical = backing.of_id(volume.volume_id)
        program = Cryptsetup(self.host.run, waits_for_udev=luks.has_udev())
        copies = HeaderCopies(self.settings.header_backups, program)

        def forget_key() -> None:
            volume_groups = status.volume_groups(self.settings, self.host)
            reports = Reports(volume_groups)
            activator = Activator(volume_groups, self.host.devices, reports)
            tag_writer = TagWriter(volume_groups, Mender(volume_groups, reports, activator))
            tag_writer.replace(logical, tag.OF_KEYS, {})

        return Headers(
            name, self.host.kernel, self._logical_device(name), program, copies, forget_key
        )

    def is_open(self, name: str) -> bool:
        """Whether an encrypted volume is open, that is, has a dm-crypt device."""
        return self.host.devices.mapping(self._logical_device(name)) is not None

    def _logical_device(self, name: str) -> Device:
        """The device of a volume's logical volume; raises NotStaged if the latter is inactive."""
        volume = self.find(name)
        device = self._device(volume)
        if device is None:
            logical = backing.of_id(volume.volume_id)
            volume_path = f"{logical.group}/{logical.name}"
            remedy = f"publish it, or activate that alone: `lvchange -ay -K {volume_path}`"
            raise errors.NotStaged(name, "its logical volume is not active", remedy)
        return device

    def _device(self, volume: csi.Volume) -> Device | None:
        logical = backing.of_id(volume.volume_id)
        return self.host.devices.find(logical.group, logical.name)

    def modify(self, name: str, parameters: Mapping[str, str]) -> None:
        """Change mutable parameters of a volume, and print the given values."""
        self.caller.modify(self.find(name).volume_id, parameters)
        print(f"{name}: {', '.join(f'{key}={value}' for key, value in parameters.items())}")

    def repair(self, name: str, *, pool_metadata: bool, confirmed: bool) -> None:
        """Repair a volume, or its thin pool's metadata, and wait until the repair is done.

        The service refuses to overwrite images that differ, as md cannot know which is right. The
        user is asked then, and the repair goes on if the user confirms.
        """
        volume_id = self.find(name).volume_id
        question = (
            f"Take one image of {name} for right, and overwrite what differs in the others? Compare"
            " with a backup first"
        )

        def repair(*, differing_images: bool) -> None:
            self._until_done(
                lambda: self.caller.repair(
                    volume_id, pool_metadata=pool_metadata, differing_images=differing_images
                )
            )

        try:
            repair(differing_images=confirmed)
            return
        except grpc.RpcError as error:
            if confirmed or not _do_images_differ(error):
                raise
        if not terminal.confirmed(question):
            raise errors.NotConfirmed(name, "repaired")
        repair(differing_images=True)

    def replace_disk(self, old_disk: str, new_disk: str, *, confirmed: bool) -> None:
        """Replace a disk by another, if the user confirms; wait until all volumes are in sync."""
        question = f"Make {new_disk} a disk of the group, and take {old_disk} out of it?"
        if not confirmed and not terminal.confirmed(question):
            raise errors.NotConfirmed(new_disk, "taken")
        self._until_done(lambda: self.caller.replace_disk(old_disk, new_disk))

    @staticmethod
    def _until_done(step: Callable[[], tuple[bool, str]]) -> None:
        """Repeat `step` until it reports that the work is done, and print each new message.

        If the user interrupts the command, the service goes on with the work.
        """
        printed = ""
        while True:
            try:
                is_done, message = step()
            except grpc.RpcError as error:
                if error.code() not in _NOT_YET:
                    raise
                is_done, message = False, error.details() or error.code().name
            if message != printed:
                print(message, flush=True)
            if is_done:
                return
            printed = message
            sleep(_LOOK_SECONDS)

    def delete(self, name: str, *, confirmed: bool) -> None:
        """Erase and remove a volume, if the user confirms."""
        listing = self.caller.volumes_here()
        volume = _find_named(name, listing)
        description = f"{name}, {terminal.human(volume.capacity_bytes)}"
        if claim := listing.claims.get(volume.volume_id):
            description += f", which is the cluster's, of the claim {claim}"
        if not confirmed and not terminal.confirmed(f"Delete {description}, and all its data?"):
            raise errors.NotConfirmed(name)
        self.caller.delete(volume.volume_id)
        print(f"{name} is deleted")

    def take_snapshot(self, volume_name: str, name: str, size: str) -> None:
        """Take a snapshot; `size` is the COW store's, empty for the default of the device class."""
        volume = self.find(volume_name)
        parameters = {"size": size} if size else {}
        snapshot = self.caller.snapshot(name, volume.volume_id, parameters)
        print(f"{name}: {volume_name} as it is now, {snapshot.snapshot_id}")

    def show_snapshots(self, *, as_json: bool, names_only: bool) -> None:
        """Print all snapshots: as a table, as JSON, or only their names."""
        listing = self.caller.snapshots_here()
        _print_absent(listing.away)
        rows = [
            _snapshot_row(snapshot) | _key(snapshot.snapshot_id, listing.keys)
            for snapshot in listing.entries
        ]
        if names_only:
            print(*(row["name"] for row in rows), sep="\n")
        elif as_json:
            print(_json(rows))
        else:
            titles = ("SNAPSHOT", "VOLUME", "TAKEN", "SIZE", "READY", "KEY")
            grid = terminal.table(*titles, right=("SIZE",))
            for row in rows:
                ready_text = "yes" if row["ready"] else "no"
                size = terminal.human(row["size_bytes"])
                key = row.get("key_generation", "")
                grid.add_row(row["name"], row["volume"], row["taken"], size, ready_text, key)
            terminal.console().print(grid)

    def delete_snapshot(self, name: str, *, confirmed: bool) -> None:
        """Delete a snapshot, if the user confirms."""
        snapshot = self.find_snapshot(name)
        if not confirmed and not terminal.confirmed(f"Delete snapshot {name}?"):
            raise errors.NotConfirmed(name)
        self.caller.delete_snapshot(snapshot.snapshot_id)
        print(f"{name} is deleted")

    def show_slowest(self, maximum_calls: int, method: str = "", *, as_json: bool) -> None:
        """Print the slowest of the last RPCs, or of the RPCs of one method, with their steps."""
        slowest = self.caller.slowest_calls(_EVERY_CALL if method else maximum_calls).calls
        calls = [call for call in slowest if method in ("", call.method)][:maximum_calls]
        if as_json:
            as_dict = partial(
                MessageToDict,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            print(_json([as_dict(call) for call in calls]))
            return
        for call in calls:
            began = strftime("%H:%M:%S", localtime(call.time_seconds))
            volume_text = f" {call.volume}" if call.volume else ""
            print(f"{began} {call.method}{volume_text} {call.code} {_ms(call.seconds)}")
            for step in call.steps:
                after_text, duration_text = _ms(step.after_seconds), _ms(step.seconds)
                print(f"  at {after_text}: {step.kind} {step.what} {duration_text}")

    def find(self, name: str) -> csi.Volume:
        """The volume whose name, logical volume's name or id is `name`.

        Raises NoSuchVolume; AbsenceNotProved if a missing volume group may have the volume.
        """
        return _find_named(name, self.caller.volumes_here())

    def find_snapshot(self, name: str) -> csi.Snapshot:
        """The snapshot whose name, logical volume's name or id is `name`.

        Raises NoSuchSnapshot; AbsenceNotProved if a missing volume group may have the snapshot.
        """
        logical = names.logical_volume(ids.SNAPSHOT_PREFIX, name)
        listing = self.caller.snapshots_here()
        for snapshot in listing.entries:
            if name == snapshot.snapshot_id or ids.logical_name(snapshot.snapshot_id) in (
                logical,
                name,
            ):
                return snapshot
        _require_all_here("snapshot", name, listing.away)
        raise errors.NoSuchSnapshot(name)

    def _places(self, volume: csi.Volume) -> list[Path]:
        """The paths at which a volume is mounted, including the staging path."""
        device = self._device(volume)
        if device is None:
            return []
        kernel = self.host.kernel
        used_device = self.host.devices.mapping(device) or device
        return [
            Path(mount.path)
            for mount in users.mounts_of_volume(kernel, table.read(kernel), used_device)
        ]

    def _published(self, volume: csi.Volume, staging: Path) -> list[Path]:
        return [path for path in self._places(volume) if path != staging]


@contextmanager
def connect(settings: Config, host: Host) -> Iterator[VolumeVerbs]:
    """Connect to the running service; raises NotServed and NotPermitted.

    An error of the service in the body of the `with` is raised as CallRefused.
    """
    try:
        is_served = sockets.is_served(settings.endpoint)
    except PermissionError:
        action, advice = f"use {settings.endpoint}", ", or as a user who may write to that socket"
        raise errors.NotPermitted(action, advice) from None
    if not is_served:
        raise errors.NotServed(str(settings.endpoint))
    with Client(settings.endpoint) as caller:
        try:
            yield VolumeVerbs(caller, settings, host)
        except grpc.RpcError as error:
            raise errors.CallRefused(error.code().name, error.details() or "") from None


def _retry_while_aborted(call: Callable[[], T]) -> T:
    """Repeat a call while it fails with the code ABORTED, and return its result.

    ABORTED means that the service still works on the volume. The message of the error, which tells
    the progress or an obstacle, is printed to standard error whenever it changes.
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


def _do_images_differ(error: grpc.RpcError) -> bool:
    """Return whether the service refused to overwrite images of a RAID that differ."""
    is_refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
    return is_refused and errors.ImagesDiffer.FIELD in (error.details() or "")


def _print_absent(reasons_by_group: Mapping[str, str]) -> None:
    """Print, to standard error, why each of the missing volume groups is missing."""
    for group in sorted(reasons_by_group):
        print(reasons_by_group[group], file=sys.stderr)


def _find_named(name: str, listing: carver.VolumesHereResponse) -> csi.Volume:
    """The volume in a list whose name, logical volume's name or id is `name`.

    Raises NoSuchVolume; AbsenceNotProved if a missing volume group may have the volume.
    """
    logical = names.logical_volume(ids.VOLUME_PREFIX, name)
    for volume in listing.entries:
        if name == volume.volume_id or _logical(volume) in (logical, name):
            return volume
    _require_all_here("volume", name, listing.away)
    raise errors.NoSuchVolume(name)


def _require_all_here(kind: str, name: str, reasons_by_group: Mapping[str, str]) -> None:
    """Raise AbsenceNotProved if a missing volume group may have the volume or snapshot `name`."""
    volume_id = VolumeId.parse(name)
    reasons = {
        group: why
        for group, why in reasons_by_group.items()
        if volume_id is None or group == volume_id.group
    }
    if reasons:
        raise errors.AbsenceNotProved(kind, name, (why for _, why in sorted(reasons.items())))


def _secrets(key_file: str) -> dict[str, str]:
    """The secrets of a CSI call: the key in a key file, or none without a file.

    Raises BadField for a key that is not UTF-8, and the errors of `encryption.key_in`.
    """
    if not key_file:
        return {}
    try:
        return {secret.PASSPHRASE: encryption.key_in(key_file).data.decode()}
    except UnicodeDecodeError:
        # Raise BadField outside this block: the UnicodeDecodeError, which holds the key, must not
        # become its context.
        pass
    raise errors.BadField("--key-file", "is not UTF-8, and a secret of CSI's is text")


def _group_and_name(path: str) -> tuple[str, str]:
    group, slash, name = path.partition("/")
    if not (group and slash and name) or "/" in name:
        raise errors.BadField("GROUP/LV", f"{path!r} is not a group, / and a logical volume")
    return group, name


def _print_changes(answer: carver.AdoptVolumeResponse, *, dry_run: bool) -> None:
    prefix = "to do: " if dry_run else "done: "
    for change in answer.changes or ["nothing: it is so already"]:
        print(f"{prefix}{change}", file=sys.stderr)


def _logical(volume: csi.Volume) -> str:
    return ids.logical_name(volume.volume_id)


def _name(volume: csi.Volume) -> str:
    """The CO's name of a volume, or the logical volume's name if the CO's is not recorded."""
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
    """A sentence for each health condition of a volume: status, reason and message."""
    return [
        f"{csi.VolumeHealthErrorType.Name(entry.status)} {entry.reason}: {entry.message}"
        for entry in health.health_statuses
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
