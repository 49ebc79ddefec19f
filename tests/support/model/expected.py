"""The model: what every call answers and does, on a node that is a few dictionaries.

Written from docs/troubleshooting.md and docs/design.md, sharing no line with the code that it
judges.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import NoReturn, Self

from model import operations as do
from model.operations import MIB, Outcome, State, Use

from mount.filesystem import FILE_SYSTEMS

EXTENT_BYTES = 4 * MIB
DEFAULT_BYTES = 1 << 30
CLASS = "plain"
DEFAULT_FS_TYPE = "ext4"
ENCRYPTION = "carver/encryption"
HEADER_BYTES = 4 * MIB
AHEAD, LIMIT = "carver/readAhead", "carver/writeIOPS"
RATE = "carver/maximumRecoveryRate"
LEAST_IOPS = 10
LEAST_BYTES = {key: one.minimum_bytes for key, one in FILE_SYSTEMS.items()}


@dataclass
class Volume:
    """A volume; `contents` is what a probe finds on it."""

    size_bytes: int
    use: Use
    fs_type: str
    formatted: str = ""
    contents: str = ""
    # Whether that was written behind Carver's back: a file system that is not known by its UUID.
    is_foreign: bool = False
    fs_bytes: int = 0
    superblock_read_only: bool = False
    active: bool = True
    source: tuple[str, str] = do.NO_SOURCE
    read_ahead: str = "auto"
    # How many writes its pods may do in a second; 0 for any number.
    write_iops: int = 0
    # What it was to grow to and could not, as long as nothing less is asked for.
    wanted_bytes: int = 0
    # The same, where only a call grows it; where it has that size, what uses it has not.
    refused_bytes: int = 0
    # Of an encrypted one: what its header takes; by which key; and how much of it is open.
    header_bytes: int = 0
    key: str = ""
    # The size that it was created with.
    made_bytes: int = 0
    # What was asked for, where it was rounded up, and to which size.
    asked_bytes: tuple[int, int] = (0, 0)
    open_bytes: int = 0
    # How it is attached; empty where it is not.
    attached: str = ""

    @property
    def capacity_bytes(self) -> int:
        """What its user has."""
        return self.size_bytes - self.header_bytes

    @property
    def requested_bytes(self) -> int:
        """The size of its snapshots to their callers: what has to be asked for a copy of it."""
        asked, given = self.asked_bytes
        return asked if given == self.size_bytes else self.capacity_bytes

    def note(self, asked_bytes: int) -> None:
        """Note what its present size was rounded up from."""
        if 0 < asked_bytes < self.capacity_bytes:
            self.asked_bytes = (asked_bytes, self.size_bytes)


@dataclass(frozen=True)
class Snapshot:
    """A volume as it was, and the room that is kept for what it overwrites."""

    source: str
    was: Volume
    area_bytes: int


@dataclass(frozen=True)
class Place:
    """Where a volume is mounted; `read_only` is how it is seen there, superblock and all."""

    volume: str
    kind: str
    read_only: bool


class _Refused(Exception):
    """A call that is not OK."""


def _refuse(code: str) -> NoReturn:
    raise _Refused(code)


def _refuse_if(condition: object, code: str) -> None:
    if condition:
        _refuse(code)


@dataclass
class Model:
    """A node. Paths are names within one directory."""

    total_bytes: int
    volumes: dict[str, Volume] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)

    def copy(self) -> Self:
        """A node of its own in the same state."""
        return copy.deepcopy(self)

    @property
    def free_bytes(self) -> int:
        """What new volumes can have."""
        areas = sum(one.area_bytes for one in self.snapshots.values())
        return self.total_bytes - areas - sum(one.size_bytes for one in self.volumes.values())

    def of(self, volume: str) -> dict[str, Place]:
        """Where a volume is mounted."""
        return {path: one for path, one in self.places.items() if one.volume == volume}

    def state(self) -> State:
        """What there is to be seen."""
        over = {one.volume for one in self.places.values() if one.kind == "block" and one.read_only}
        snapshots = (
            # It is active whenever its source is.
            (
                name,
                one.area_bytes,
                one.was.formatted,
                "ready",
                self.volumes[one.source].active,
                "auto",
                0,
            )
            for name, one in self.snapshots.items()
        )
        volumes = (
            (
                *(name, one.size_bytes, one.formatted, "ready", one.active),
                *(one.read_ahead, one.write_iops),
            )
            for name, one in self.volumes.items()
        )
        places = ((path, one.volume, one.kind, one.read_only) for path, one in self.places.items())
        mappings = ((name, one.open_bytes) for name, one in self.volumes.items() if one.open_bytes)
        return State(
            volumes=do.ordered((*volumes, *snapshots)),
            places=do.ordered(places),
            loops=do.ordered((name, 1) for name in over),
            entries=do.ordered(self.entries.items()),
            free_bytes=self.free_bytes,
            mappings=do.ordered(mappings),
            limits=do.ordered(
                (name, one.write_iops)
                for name, one in self.volumes.items()
                if one.write_iops and self.of(name)
            ),
            attached=do.ordered(
                (name, one.attached) for name, one in self.volumes.items() if one.attached
            ),
        )

    def apply(self, call: do.Call) -> Outcome:
        """Carry out a call."""
        try:
            return Outcome("OK", self._carry_out(call))
        except _Refused as refused:
            return Outcome(str(refused))

    def _carry_out(self, call: do.Call) -> object:
        match call:
            case do.Create():
                # It would be empty for ever.
                is_useless = call.use.reads and call.source == do.NO_SOURCE
                _refuse_if(is_useless, "INVALID_ARGUMENT")
                return self._create(call)
            case do.Modify():
                self._modify(call)
            case do.Attach():
                return self._attach(call)
            case do.Detach():
                volume = self.volumes.get(call.volume)
                if volume is not None and call.node in ("", do.HERE):
                    volume.attached = ""
            case do.Delete():
                self._delete(call)
            case do.Get():
                return self._require(call.volume).capacity_bytes
            case do.Validate():
                return self._validate(call)
            case do.Volumes():
                return sorted(
                    (name, one.capacity_bytes)
                    for name, one in self.volumes.items()
                    if not do.is_inline(name)
                )
            case do.Snapshot():
                return self._snapshot(call)
            case do.DeleteSnapshot():
                self.snapshots.pop(call.snapshot, None)
            case do.Snapshots():
                return sorted(
                    (name, one.source, one.was.requested_bytes)
                    for name, one in self.snapshots.items()
                    if call.volume in ("", one.source)
                )
            case do.Capacity():
                return self.free_bytes
            case do.Expand():
                return self._expand(call)
            case do.Stage():
                self._stage(call)
            case do.Unstage():
                self._unmount(call.volume, call.path)
                self._close(call.volume)
            case do.Publish():
                self._publish(call)
            case do.PublishInline():
                self._publish_inline(call)
            case do.Unpublish():
                self._unmount(call.volume, call.path)
                self.entries.pop(call.path, None)
                if do.is_inline(call.volume):
                    _refuse_if(self.of(call.volume), "FAILED_PRECONDITION")
                    self.volumes.pop(call.volume, None)
            case do.Stats():
                place = self._at(call.volume, call.path)
                volume = self.volumes[call.volume]
                if place.kind == "fs":
                    return volume.fs_bytes
                return volume.open_bytes or volume.size_bytes
            case do.Health():
                if not call.by_node:
                    self._require(call.volume)
                elif call.volume not in self.volumes and call.volume != do.ELSEWHERE:
                    _refuse("NOT_FOUND")
            case do.NodeExpand():
                return self._node_expand(call)
        return None

    # The Controller

    def _create(self, call: do.Create) -> object:
        _refuse_if(0 < call.limit_bytes < call.required_bytes, "INVALID_ARGUMENT")
        parameters = dict(call.parameters)
        if parameters.keys() - {"carver/fsType", "carver/class", ENCRYPTION}:
            _refuse("INVALID_ARGUMENT")
        _refuse_if(parameters.get("carver/class", CLASS) != CLASS, "INVALID_ARGUMENT")
        read_ahead, write_iops = _tuning(call.mutable)
        _refuse_rates(call.mutable)
        there = self.volumes.get(call.volume)
        _refuse_if(there is not None and there.source != call.source, "ALREADY_EXISTS")
        if there is not None and not _is_within(call, there.capacity_bytes):
            _refuse("ALREADY_EXISTS")
        was = self._source(call) if there is None else None
        held, least, header = "", 0, HEADER_BYTES if ENCRYPTION in parameters else 0
        encrypted = bool(header)
        if was is not None:
            held, least, header = was.formatted, was.capacity_bytes, was.header_bytes
            _refuse_if(0 < call.limit_bytes < least, "OUT_OF_RANGE")
        elif there is not None and call.source != do.NO_SOURCE:
            held = there.fs_type
        asked = call.use.fs_type or parameters.get("carver/fsType") or held or DEFAULT_FS_TYPE
        fs_type = "" if call.use.is_block else asked
        wish = max(call.required_bytes, least)
        if not wish:
            within = (call.limit_bytes + header) // EXTENT_BYTES * EXTENT_BYTES - header
            wish = min(DEFAULT_BYTES, max(0, within) or DEFAULT_BYTES)
        planned = _extents(max(wish, LEAST_BYTES.get(fs_type, 0)) + header)
        if there is None and call.limit_bytes and planned - header > call.limit_bytes:
            _refuse("OUT_OF_RANGE")
        _refuse_if(was is not None and encrypted != bool(header), "INVALID_ARGUMENT")
        made = Volume(planned, call.use, fs_type, source=call.source, header_bytes=header)
        made.made_bytes = planned
        made.note(call.required_bytes)
        if there is None:
            if was is not None:
                self._fill(made, was)
            bridge = 0
            if call.source[0] == do.OF_VOLUME and was is not None:
                bridge = _area(was.size_bytes, 20)
            _refuse_if(planned + bridge > self.free_bytes, "RESOURCE_EXHAUSTED")
            there = self.volumes[call.volume] = made
            made.read_ahead, made.write_iops = read_ahead or "auto", write_iops or 0
            if was is not None:
                self.volumes[self._volume_of(call.source)].active = True
        _refuse_if(there.use != made.use, "ALREADY_EXISTS")
        # What a repeated call does not say is not compared: its class may have changed since.
        is_said = bool(call.use.fs_type or parameters.get("carver/fsType"))
        _refuse_if(is_said and there.fs_type != made.fs_type, "ALREADY_EXISTS")
        _refuse_if(encrypted and not there.header_bytes, "ALREADY_EXISTS")
        self._tune(call.volume, read_ahead, write_iops)
        context = {"carver/class": CLASS}
        if there.fs_type:
            context["carver/fsType"] = there.fs_type
        if there.header_bytes:
            context[ENCRYPTION] = "luks2"
        return there.capacity_bytes, context

    def _modify(self, call: do.Modify) -> None:
        read_ahead, write_iops = _tuning(call.mutable)
        _refuse_if(not call.mutable, "INVALID_ARGUMENT")
        self._require(call.volume)
        _refuse_rates(call.mutable)
        self._tune(call.volume, read_ahead, write_iops)

    def _tune(self, name: str, read_ahead: str, write_iops: int | None) -> None:
        """Snapshots that need the volume keep its read-ahead as it is."""
        volume = self.volumes[name]
        if read_ahead not in ("", volume.read_ahead):
            _refuse_if(self.has_snapshots(name), "FAILED_PRECONDITION")
            volume.read_ahead = read_ahead
        if write_iops is not None:
            volume.write_iops = write_iops

    def _source(self, call: do.Create) -> Volume | None:
        """What a new volume is made of, as it was then."""
        kind, name = call.source
        if not kind:
            return None
        if kind == do.OF_VOLUME:
            return self._require(name)
        _refuse_if(name not in self.snapshots, "NOT_FOUND")
        return self.snapshots[name].was

    def _volume_of(self, source: tuple[str, str]) -> str:
        kind, name = source
        return name if kind == do.OF_VOLUME else self.snapshots[name].source

    def _fill(self, made: Volume, was: Volume) -> None:
        """What a volume has that is made of another."""
        if made.fs_type:
            if was.use.is_block or was.formatted not in ("", made.fs_type):
                _refuse("INVALID_ARGUMENT")
            made.formatted = was.formatted
        made.contents, made.fs_bytes, made.key = was.contents, was.fs_bytes, was.key

    def _snapshot(self, call: do.Snapshot) -> object:
        _refuse_if(call.volume == do.MALFORMED or do.is_inline(call.volume), "NOT_FOUND")
        there = self.snapshots.get(call.snapshot)
        if there is None:
            was = self._require(call.volume)
            _refuse_if(was.size_bytes > self.free_bytes, "RESOURCE_EXHAUSTED")
            there = Snapshot(call.volume, copy.deepcopy(was), was.size_bytes)
            self.snapshots[call.snapshot] = there
        _refuse_if(there.source != call.volume, "ALREADY_EXISTS")
        return there.was.requested_bytes

    def has_snapshots(self, volume: str) -> bool:
        """Whether there are snapshots that need the volume."""
        return any(one.source == volume for one in self.snapshots.values())

    def _delete(self, call: do.Delete) -> None:
        _refuse_if(call.volume == do.ELSEWHERE, "FAILED_PRECONDITION")
        if do.is_inline(call.volume):
            return
        _refuse_if(self.of(call.volume) or self.has_snapshots(call.volume), "FAILED_PRECONDITION")
        self.volumes.pop(call.volume, None)

    def _attach(self, call: do.Attach) -> object:
        volume = self._require(call.volume)
        _refuse_if(call.node != do.HERE, "NOT_FOUND")
        _refuse_if(not self._fits(volume, call.use), "INVALID_ARGUMENT")
        writes = "ro" if call.read_only else "rw"
        wanted = f"{call.use.access}:{call.use.mode}:{writes}:{call.node}"
        _refuse_if(volume.attached not in ("", wanted), "ALREADY_EXISTS")
        volume.attached = wanted
        return {"carver/readOnly": "true"} if call.read_only else {}

    @staticmethod
    def _fits(volume: Volume, use: Use) -> bool:
        """Whether what a volume holds can be used so."""
        if use.is_block:
            return True
        return not volume.use.is_block and (
            not volume.formatted or use.fs_type in {"", volume.formatted}
        )

    def _validate(self, call: do.Validate) -> bool:
        volume = self._require(call.volume)
        if call.use.is_block:
            return True
        if not self._fits(volume, call.use):
            return False
        fs_type = call.use.fs_type or volume.formatted or volume.fs_type
        return volume.capacity_bytes >= LEAST_BYTES[fs_type]

    def _expand(self, call: do.Expand) -> object:
        _refuse_if(0 < call.limit_bytes < call.required_bytes, "INVALID_ARGUMENT")
        self._grow(call)
        volume = self.volumes[call.volume]
        return volume.capacity_bytes, not volume.use.is_block

    def _grow(self, call: do.Expand | do.NodeExpand) -> None:
        volume = self._require(call.volume)
        header = volume.header_bytes
        wanted = max(_extents(call.required_bytes + header), volume.size_bytes)
        _refuse_if(call.limit_bytes and wanted - header > call.limit_bytes, "OUT_OF_RANGE")
        if wanted - volume.size_bytes > self.free_bytes:
            held = self.has_snapshots(call.volume)
            volume.wanted_bytes, volume.refused_bytes = (wanted, 0) if held else (0, wanted)
            # Kubelet lets a pod start after FAILED_PRECONDITION only; the resizer takes
            # OUT_OF_RANGE for infeasible.
            _refuse("OUT_OF_RANGE" if isinstance(call, do.Expand) else "FAILED_PRECONDITION")
        if wanted > volume.size_bytes and volume.active and self.has_snapshots(call.volume):
            if self.of(call.volume):
                volume.wanted_bytes, volume.refused_bytes = wanted, 0
                _refuse("FAILED_PRECONDITION")
            volume.active, volume.open_bytes = False, 0
        is_void = wanted < volume.wanted_bytes or volume.size_bytes < volume.refused_bytes
        if is_void and call.required_bytes:
            volume.wanted_bytes = volume.refused_bytes = 0
        if wanted > volume.size_bytes:
            volume.size_bytes = wanted
            volume.note(call.required_bytes)

    @staticmethod
    def _settle(volume: Volume) -> None:
        """It has what was asked for, and so has what uses it."""
        if 0 < volume.refused_bytes <= volume.size_bytes:
            volume.wanted_bytes = volume.refused_bytes = 0

    def _settle_whole(self, volume: Volume) -> None:
        """The same at a stage, which grows no open mapping without a key."""
        if volume.open_bytes in (0, volume.capacity_bytes):
            self._settle(volume)

    @staticmethod
    def _stays(volume: Volume) -> NoReturn:
        """What uses it could not be made as large as it is."""
        if max(volume.wanted_bytes, volume.refused_bytes) <= volume.size_bytes:
            volume.wanted_bytes, volume.refused_bytes = 0, volume.size_bytes
        _refuse("FAILED_PRECONDITION")

    def _catch_up(self, name: str) -> None:
        """What is about to be staged grows to what is on record, where it can."""
        volume = self.volumes[name]
        more = volume.wanted_bytes - volume.size_bytes
        in_use = self.has_snapshots(name) and self.of(name)
        if 0 < more <= self.free_bytes and not in_use:
            volume.size_bytes = volume.wanted_bytes
            if self.has_snapshots(name):
                volume.open_bytes = 0

    # The Node

    def _stage(self, call: do.Stage) -> None:
        volume = self._require(call.volume)
        if call.use.is_block:
            is_used = bool(volume.open_bytes and self.of(call.volume))
            if is_used and volume.wanted_bytes <= volume.size_bytes:
                self._settle_whole(volume)
                return
            self._check_key(volume, call.key)
            volume.active = True
            self._catch_up(call.volume)
            self._open(call.volume, call.key)
            self._settle_whole(volume)
            return
        read_only = call.use.reads
        there = self.places.get(call.path)
        fs_type = call.use.fs_type or volume.fs_type
        if there is not None and (there.volume, there.kind) == (call.volume, "fs"):
            _refuse_if((volume.contents, there.read_only) != (fs_type, read_only), "ALREADY_EXISTS")
            self._fill_device(volume, read_only, call.key)
            return
        self._check_key(volume, call.key)
        volume.active = True
        self._catch_up(call.volume)
        _refuse_if(volume.use.is_block, "INVALID_ARGUMENT")
        self._open(call.volume, call.key)
        try:
            self._mount(call, volume, fs_type, there, read_only)
        except _Refused:
            self._close(call.volume)
            raise
        self._fill_device(volume, read_only, call.key)

    def _mount(
        self, call: do.Stage, volume: Volume, fs_type: str, there: Place | None, read_only: bool
    ) -> None:
        self._format(volume, fs_type)
        self._make(call.path, "dir")
        _refuse_if(there is not None, "FAILED_PRECONDITION")
        # A superblock has one access for all of its mounts, and lives as long as any of them.
        lives = any(one.kind == "fs" for one in self.of(call.volume).values())
        _refuse_if(lives and volume.superblock_read_only != read_only, "FAILED_PRECONDITION")
        volume.superblock_read_only = read_only
        self.places[call.path] = Place(call.volume, "fs", read_only)

    @staticmethod
    def _check_key(volume: Volume, key: str) -> None:
        """A key for what is encrypted, and for nothing else."""
        _refuse_if(bool(key) != bool(volume.header_bytes), "INVALID_ARGUMENT")

    def _open(self, name: str, key: str) -> None:
        """An encrypted volume, by its key; in use elsewhere it stays as it is."""
        volume = self.volumes[name]
        if not volume.header_bytes or (volume.open_bytes and self.of(name)):
            return
        volume.open_bytes = 0
        _refuse_if(volume.key not in ("", key), "UNAUTHENTICATED")
        volume.key, volume.open_bytes = key, volume.capacity_bytes

    def _close(self, name: str) -> None:
        """What is nowhere in use is not open either."""
        if name in self.volumes and not self.of(name):
            self.volumes[name].open_bytes = 0

    @staticmethod
    def _grow_open(volume: Volume, key: str) -> None:
        """An open volume grows by its key only."""
        if 0 < volume.open_bytes < volume.capacity_bytes:
            _refuse_if(not key, "FAILED_PRECONDITION")
            _refuse_if(key != volume.key, "UNAUTHENTICATED")
            volume.open_bytes = volume.capacity_bytes

    def _fill_device(self, volume: Volume, read_only: bool, key: str) -> None:
        """At each stage, where the volume may be larger than its source, or than before."""
        grew = volume.wanted_bytes or volume.refused_bytes
        grew = grew or volume.size_bytes > volume.made_bytes
        if (volume.source != do.NO_SOURCE or grew) and not read_only:
            if key:
                self._grow_open(volume, key)
            volume.fs_bytes = volume.open_bytes or volume.size_bytes
            self._settle_whole(volume)

    def _format(self, volume: Volume, fs_type: str) -> None:
        _refuse_if(volume.contents not in ("", fs_type), "FAILED_PRECONDITION")
        if volume.is_foreign and not volume.formatted and volume.source == do.NO_SOURCE:
            _refuse("FAILED_PRECONDITION")
        if not volume.contents:
            _refuse_if(volume.formatted, "FAILED_PRECONDITION")
            _refuse_if(volume.capacity_bytes < LEAST_BYTES[fs_type], "OUT_OF_RANGE")
            volume.contents, volume.fs_bytes = fs_type, volume.open_bytes or volume.size_bytes
        volume.formatted = volume.formatted or fs_type

    def _publish(self, call: do.Publish) -> None:
        volume = self._require(call.volume)
        read_only = call.read_only or call.use.reads
        kind = "block" if call.use.is_block else "fs"
        staged = self.places.get(call.staging)
        is_staged = volume.active and (volume.open_bytes or not volume.header_bytes)
        if kind == "fs":
            is_there = staged and (staged.volume, staged.kind) == (call.volume, "fs")
            is_staged = bool(volume.active and is_there)
        if not is_staged:
            # The call has no key.
            _refuse_if(bool(volume.header_bytes), "FAILED_PRECONDITION")
            self._stage(do.Stage(call.volume, call.staging, call.use))
            staged = self.places.get(call.staging)
        if kind == "fs":
            assert staged is not None
            _refuse_if(staged.read_only and not read_only, "FAILED_PRECONDITION")
        there = self.places.get(call.path)
        repeated = there is not None and (there.volume, there.kind) == (call.volume, kind)
        if repeated:
            _refuse_if(there != Place(call.volume, kind, read_only), "ALREADY_EXISTS")
            return
        elsewhere = self.of(call.volume).keys() - {call.staging, call.path}
        _refuse_if(elsewhere and not call.use.is_shared, "FAILED_PRECONDITION")
        self._make(call.path, "dir" if kind == "fs" else "file")
        _refuse_if(there is not None, "FAILED_PRECONDITION")
        self.places[call.path] = Place(call.volume, kind, read_only)

    def _publish_inline(self, call: do.PublishInline) -> None:
        _refuse_if(call.use.is_block, "INVALID_ARGUMENT")
        use = replace(call.use, mode=do.READER_ONLY) if call.read_only else call.use
        read_only = use.reads
        there = self.places.get(call.path)
        _refuse_if(there is not None and there.volume != call.volume, "FAILED_PRECONDITION")
        if self.of(call.volume).keys() - {call.path} or self.entries.get(call.path) == "file":
            _refuse("FAILED_PRECONDITION")
        fs_type = use.fs_type or DEFAULT_FS_TYPE
        if there is not None:
            if (self.volumes[call.volume].contents, there.read_only) != (fs_type, read_only):
                _refuse("ALREADY_EXISTS")
            return
        self._create(do.Create(call.volume, call.required_bytes, 0, use))
        volume = self.volumes[call.volume]
        volume.active = True
        self._format(volume, fs_type)
        self._make(call.path, "dir")
        volume.superblock_read_only = read_only
        self.places[call.path] = Place(call.volume, "fs", read_only)

    def _unmount(self, name: str, path: str) -> None:
        there = self.places.get(path)
        _refuse_if(there is not None and there.volume != name, "FAILED_PRECONDITION")
        self.places.pop(path, None)

    def _node_expand(self, call: do.NodeExpand) -> int:
        _refuse_if(0 < call.limit_bytes < call.required_bytes, "INVALID_ARGUMENT")
        # At any place of it: kubelet's path may be a pod's that ended.
        every = self.of(call.volume)
        place = every.get(call.path) or next(iter(every.values()), None)
        if place is None:
            self._require(call.volume)
            _refuse("FAILED_PRECONDITION")
        volume = self.volumes[call.volume]
        size_bytes = volume.open_bytes or volume.size_bytes
        enough = call.required_bytes <= size_bytes
        is_due = volume.wanted_bytes > volume.size_bytes or volume.refused_bytes > 0
        if is_due or not enough or (call.limit_bytes and size_bytes > call.limit_bytes):
            self._grow(call)
            size_bytes = volume.capacity_bytes
        if 0 < volume.open_bytes < volume.capacity_bytes and call.key != volume.key:
            self._stays(volume)  # of UNAUTHENTICATED kubelet would keep a pod from starting
        self._grow_open(volume, call.key)
        if place.kind == "fs":
            mine = [one for one in self.of(call.volume).values() if one.kind == "fs"]
            full = volume.contents == "xfs" and volume.fs_bytes == volume.capacity_bytes
            # The kernel grows no file system through a read-only mount.
            is_read_only = all(one.read_only for one in mine)
            reads = call.reads or ":ro:" in volume.attached
            if is_read_only and not full and not reads:
                self._stays(volume)
            if not is_read_only:
                volume.fs_bytes = volume.capacity_bytes
        self._settle(volume)
        return size_bytes

    # Behind the back

    def deactivate(self, volume: str) -> None:
        """The device of a volume that is nowhere in use goes."""
        self.volumes[volume].active = False

    def overwrite(self, volume: str, contents: str) -> None:
        """Something else is written on a volume that is nowhere in use: nothing, or a new ext4."""
        one = self.volumes[volume]
        one.contents, one.fs_bytes, one.is_foreign = contents, one.size_bytes, bool(contents)

    def reboot(self) -> None:
        """No mount and no device outlives the kernel; directories and files do."""
        self.places.clear()
        for one in self.volumes.values():
            one.active, one.open_bytes = False, 0

    def _require(self, name: str) -> Volume:
        _refuse_if(name == do.ELSEWHERE, "FAILED_PRECONDITION")
        _refuse_if(name not in self.volumes or do.is_inline(name), "NOT_FOUND")
        return self.volumes[name]

    def _at(self, name: str, path: str) -> Place:
        place = self.places.get(path)
        if place is None or place.volume != name:
            _refuse("NOT_FOUND")
        return place

    def _make(self, path: str, kind: str) -> None:
        """Have a directory or a file at a path; a bound device lies where a file does."""
        _refuse_if(self.entries.setdefault(path, kind) != kind, "FAILED_PRECONDITION")


def _tuning(mutable: tuple[tuple[str, str], ...]) -> tuple[str, int | None]:
    """The read-ahead and the limit of writes that parameters say; empty and None for nothing."""
    known = {"auto": "auto", "0": "0", "1MiB": str(MIB), "64KiB": str(64 << 10)}
    given = dict(mutable)
    limit = given.pop(LIMIT, None)
    if given.keys() - {AHEAD, RATE} or not set(given.values()) <= known.keys():
        _refuse("INVALID_ARGUMENT")
    _refuse_if(limit is not None and 0 < int(limit) < LEAST_IOPS, "INVALID_ARGUMENT")
    return known.get(given.get(AHEAD, ""), ""), None if limit is None else int(limit)


def _is_within(call: do.Create, size_bytes: int) -> bool:
    """Whether a volume of that size is one that is asked for."""
    return call.required_bytes <= size_bytes <= (call.limit_bytes or size_bytes)


def _refuse_rates(mutable: tuple[tuple[str, str], ...]) -> None:
    """The volumes here are no RAID's."""
    _refuse_if(RATE in dict(mutable), "INVALID_ARGUMENT")


def _area(size_bytes: int, percent: int) -> int:
    return _extents(-(-size_bytes * percent // 100))


def _extents(size_bytes: int) -> int:
    return max(1, -(-size_bytes // EXTENT_BYTES)) * EXTENT_BYTES
