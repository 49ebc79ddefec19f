"""What `make bench` measures: each figure with what it is compared to, its target, and what it was.

A ratio is Carver's median over that of the bare commands, in the same run on the same machine.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

RATIO = "ratio"

LVCREATE, VGS, LVEXTEND = "lvcreate", "vgs", "lvextend + resize2fs"
MKFS, BIND, DF = "mkfs.ext4 + mount", "mount --bind", "df"
READ, READ_BOTH = "dd of it, past the cache", "dd of what changed, of both"
UNBIND, UMOUNT, LVREMOVE = "umount of the bind", "umount", "blkdiscard -z + lvremove"

CREATE, REPEATED, EXPAND = "CreateVolume", "CreateVolume, repeated", "both expansions"
STAGE, PUBLISH, STATS = "NodeStageVolume, first", "NodePublishVolume", "NodeGetVolumeStats"
UNPUBLISH, UNSTAGE = "NodeUnpublishVolume", "NodeUnstageVolume"
DELETE = "DeleteVolume, 64 MiB wiped"
ALLOCATED, CHANGED = "GetMetadataAllocated of 256 MiB", "GetMetadataDelta, 64 MiB changed"
CAPACITY, GET_VOLUME = "GetCapacity", "ControllerGetVolume"
LIST = "ListVolumes of 100"
PROBE, TRIVIAL = "Probe", "GetPluginInfo"
FLOOR = "an empty call by grpcio alone, without Carver"
SENT, DD = "256 MiB of changes, sent and received", "dd of the same blocks"
COMPARED = "256 MiB of changes, compared, sent and received"
# How fast volumes are, by what they are: all of one is written, or read.
THROUGHPUT_MIB = 16
ENCRYPTED, BYPASSED = "encrypted", "encrypted, past the work queues"
PLAIN, BY_HAND = "not encrypted", "encrypted by hand"
WRITTEN, HAS_READ = "written", "read"
LIFE = "a volume's whole life"


def moved(kind: str, action: str) -> str:
    """The name of the figure that tells how fast a kind of volume is written or read."""
    return f"{THROUGHPUT_MIB} MiB {action}, {kind}"


# Of its life, without what not every volume meets.
LIVED = (CREATE, STAGE, PUBLISH, STATS, UNPUBLISH, UNSTAGE, DELETE)
BESIDE = {
    CREATE: LVCREATE,
    REPEATED: LVCREATE,
    CAPACITY: VGS,
    LIST: VGS,
    GET_VOLUME: VGS,
    STAGE: MKFS,
    PUBLISH: BIND,
    STATS: DF,
    EXPAND: LVEXTEND,
    UNPUBLISH: UNBIND,
    UNSTAGE: UMOUNT,
    DELETE: LVREMOVE,
    SENT: DD,
    COMPARED: DD,
    ALLOCATED: READ,
    CHANGED: READ_BOTH,
    **{
        moved(kind, action): moved(BY_HAND, action)
        for action in (WRITTEN, HAS_READ)
        for kind in (ENCRYPTED, BYPASSED, PLAIN)
    },
}

# A neighbour on the disk on which Carver works in the background (beside.py).
WRITES_ALONE, ERASED_ALONE = "the same without Carver's work", "a GiB erased, alone"
WRITES_ERASING = "p99 of writes of 4 KiB with fsync, beside an erase"
WRITES_COPYING = "p99 of writes of 4 KiB with fsync, beside a copy"
ERASED_BESIDE = "a GiB erased, beside such writes"
ERASED_UNPACED = "the same by background_bandwidth = 0"

# Copy-on-write, active, of one volume; and how busy an idle service is beside them.
SNAPSHOTS = 500
AMONG_SNAPSHOTS = f"{CAPACITY}: growth from 0 to {SNAPSHOTS} snapshots"
IDLE = f"processor of an idle service beside {SNAPSHOTS} snapshots"
# In use, with limits of I/O, whose pods are idle.
LIMITED = 200
IDLE_IN_USE = f"processor of an idle service beside {LIMITED} volumes in use"
IDLE_LIMITED = f"what it takes more where these {LIMITED} have limits"

EXISTING = (100, 400)
GROWING = (CREATE, STAGE, CAPACITY)

MEDIAN_AT_ONCE = "8 clients beside 200 volumes: calls that start lvm2, median"
WORST_AT_ONCE = "8 clients beside 200 volumes: calls that start lvm2, worst"
PROBE_COMMANDS = "commands of a Probe"
START = "start, until the first GetCapacity is answered"
RESIDENT = "resident memory, service and sessions, idle"
RESIDENT_AFTER = "the same, after 8 clients"


def grown(call: str, volumes: int) -> str:
    """The name of the figure that tells how a call's time grows with a group's volumes."""
    return f"{call}: growth from 0 to {volumes} volumes"


def own(call: str) -> str:
    """The name of the figure that tells what of a call's time is Carver's own code."""
    return f"{call}: own code"


@dataclass(frozen=True)
class Promise:
    """A figure: what it is compared to, the most it may be, and what it was once (from, to)."""

    name: str
    beside: str = ""
    unit: str = RATIO
    target: float | None = None
    before: tuple[float, float] | None = None


def _once(least: float, most: float | None = None) -> tuple[float, float]:
    return least, least if most is None else most


PROMISES = (
    Promise(CREATE, LVCREATE, target=0.8, before=_once(2.1)),
    Promise(REPEATED, LVCREATE, target=0.15, before=_once(0.8)),
    Promise(CAPACITY, VGS, target=0.2, before=_once(1.1)),
    Promise(LIST, VGS, target=0.2),
    Promise(GET_VOLUME, VGS, target=0.2),
    Promise(STAGE, MKFS, target=1.3, before=_once(4.9, 7.9)),
    Promise(PUBLISH, BIND, target=1.2, before=_once(3.0, 3.8)),
    Promise(STATS, DF, target=1.0, before=_once(2.4, 3.8)),
    Promise(EXPAND, LVEXTEND),
    Promise(UNPUBLISH, UNBIND, target=1.2, before=_once(2.3, 3.7)),
    Promise(UNSTAGE, UMOUNT, target=1.2, before=_once(1.3, 2.2)),
    Promise(DELETE, LVREMOVE, target=1.0, before=_once(2.1, 3.1)),
    # No less than 0.8 times dd's rate.
    Promise(SENT, DD, target=1.25),
    Promise(COMPARED, DD),
    Promise(ALLOCATED, READ),
    Promise(CHANGED, READ_BOTH),
    *(
        Promise(moved(kind, action), moved(BY_HAND, action), target=target)
        for action in (WRITTEN, HAS_READ)
        # What the other two are beside it is what they are chosen by.
        for kind, target in ((ENCRYPTED, 1.05), (BYPASSED, None), (PLAIN, None))
    ),
    Promise(WRITES_ERASING, WRITES_ALONE, target=2),
    Promise(WRITES_COPYING, WRITES_ALONE, target=2),
    Promise(ERASED_ALONE, ERASED_UNPACED, target=2),
    Promise(ERASED_BESIDE, ERASED_ALONE, target=2),
    Promise(LIFE, "the same by hand", target=0.9, before=_once(2.95)),
    *(
        Promise(grown(call, volumes), "lvcreate's own", target=1.2)
        for volumes in EXISTING
        for call in GROWING
    ),
    Promise(AMONG_SNAPSHOTS, "the same without any", target=2),
    Promise(IDLE, unit="%", target=3, before=_once(10)),
    Promise(IDLE_IN_USE, unit="%"),
    Promise(IDLE_LIMITED, unit="%", target=1),
    Promise(PROBE, unit="ms", before=_once(450)),
    Promise(PROBE_COMMANDS, unit="commands", target=0, before=_once(1)),
    Promise(TRIVIAL, unit="ms", before=_once(18, 29)),
    Promise(FLOOR, unit="ms"),
    Promise(MEDIAN_AT_ONCE, unit="s", target=4, before=_once(9, 14)),
    Promise(WORST_AT_ONCE, unit="s"),
    Promise(START, unit="s"),
    Promise(RESIDENT, unit="MiB", target=96, before=_once(51, 56)),
    Promise(RESIDENT_AFTER, unit="MiB", target=96),
)

OWN = tuple(
    Promise(own(call), unit="µs", target=target)
    for call, target in (
        *((CREATE, 2000), (REPEATED, None), (CAPACITY, None), (GET_VOLUME, None), (STAGE, None)),
        *((PUBLISH, 800), (STATS, 400), (UNPUBLISH, None), (UNSTAGE, None), (DELETE, None)),
        *(("ListVolumes of 400", None), ("ListVolumes of 800", None)),
    )
)


@dataclass(frozen=True)
class Commands:
    """What a call had run: programs that were started, and commands of a session."""

    processes: int
    session: int

    def __add__(self, other: "Commands") -> "Commands":
        return Commands(self.processes + other.processes, self.session + other.session)


@dataclass(frozen=True)
class Row:
    """A figure as it was measured. `samples` says of how many times it is the median."""

    name: str
    beside: str
    unit: str
    value: float
    target: float | None
    samples: int
    carver_ms: float | None = None
    beside_ms: float | None = None
    commands: Commands | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is kept; None where there is none."""
        return None if self.target is None else self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_met": self.is_met}

    @classmethod
    def of_json(cls, written: Mapping[str, Any]) -> "Row":
        values = {key: value for key, value in written.items() if key != "is_met"}
        if values["commands"] is not None:
            values["commands"] = Commands(**values["commands"])
        return cls(**values)


@dataclass
class Samples:
    """What was measured: seconds by the name of a call or a bare command, and counts."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    commands: dict[str, Commands] = field(default_factory=dict)

    def time(self, name: str, step: Callable[[], object], clock: Callable[[], float]) -> None:
        """Do something, and keep how long it took; what fails is not kept."""
        started = clock()
        step()
        self.seconds[name].append(clock() - started)

    def median(self, name: str) -> float:
        """Raises KeyError where it was never measured."""
        if not self.seconds.get(name):
            raise KeyError(name)
        return median(self.seconds[name])

    def has(self, *names: str) -> bool:
        """Whether all of them were measured."""
        return all(self.seconds.get(name) for name in names)


def of_pairs(samples: Samples) -> Iterator[Row]:
    for name, beside in BESIDE.items():
        if samples.has(name, beside):
            carver, by_hand = samples.median(name), samples.median(beside)
            count, commands = len(samples.seconds[name]), samples.commands.get(name)
            yield _row(name, carver / by_hand, count, (carver, by_hand), commands)


def of_life(samples: Samples) -> Iterator[Row]:
    by_hand = [BESIDE[call] for call in LIVED]
    if samples.has(*LIVED, *by_hand):
        carver, beside = (sum(samples.median(name) for name in names) for names in (LIVED, by_hand))
        rounds = min(len(samples.seconds[call]) for call in LIVED)
        yield _row(LIFE, carver / beside, rounds, (carver, beside))


def of_growth(volumes: int, empty: Samples, full: Samples) -> Iterator[Row]:
    """How calls grow with a group's volumes, over how lvcreate does."""
    for call in GROWING:
        if all(one.has(call, LVCREATE) for one in (empty, full)):
            carver = full.median(call) / empty.median(call)
            beside = full.median(LVCREATE) / empty.median(LVCREATE)
            seconds = full.median(call), full.median(LVCREATE)
            yield _row(grown(call, volumes), carver / beside, len(full.seconds[call]), seconds)


def of_neighbour(samples: Samples) -> Iterator[Row]:
    """How late a neighbour's writes are beside background work, and how slow that is."""
    for name, beside, of in (
        (WRITES_ERASING, WRITES_ALONE, late),
        (WRITES_COPYING, WRITES_ALONE, late),
        (ERASED_ALONE, ERASED_UNPACED, median),
        (ERASED_BESIDE, ERASED_ALONE, median),
    ):
        if samples.has(name, beside):
            found, alone = of(samples.seconds[name]), of(samples.seconds[beside])
            yield _row(name, found / alone, len(samples.seconds[name]), (found, alone))


def late(seconds: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(seconds)[len(seconds) * 99 // 100]


def of_snapshots(empty: Samples, full: Samples, idle_percent: float) -> Iterator[Row]:
    """What many snapshots cost a call, and an idle service."""
    if all(one.has(CAPACITY) for one in (empty, full)):
        among, alone = full.median(CAPACITY), empty.median(CAPACITY)
        count = len(full.seconds[CAPACITY])
        yield _row(AMONG_SNAPSHOTS, among / alone, count, (among, alone))
    yield from of_value(IDLE, [idle_percent])


def of_value(name: str, values: Sequence[float], commands: Commands | None = None) -> Iterator[Row]:
    """A figure that is compared to nothing but its target: the median, in the promise's unit."""
    if values:
        yield _row(name, median(values), len(values), commands=commands)


def promised(name: str) -> Promise:
    return {one.name: one for one in (*PROMISES, *OWN)}[name]


def _row(
    name: str,
    value: float,
    count: int,
    seconds: tuple[float, float] | None = None,
    commands: Commands | None = None,
) -> Row:
    """A figure; `seconds` are Carver's and those of what it is compared to."""
    promise = promised(name)
    carver_ms, beside_ms = (one * 1000 for one in seconds) if seconds else (None, None)
    return Row(
        *(name, promise.beside, promise.unit, value, promise.target, count),
        carver_ms=carver_ms,
        beside_ms=beside_ms,
        commands=commands,
    )
