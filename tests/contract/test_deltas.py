"""What is allocated in a snapshot and what changed since another: exactly that, and told by CSI.

CARVER_DELTAS=seed=7,histories=50 asks for other random histories, and more of them, of each layout;
with --every there are 50.
"""

import random
import time
from collections.abc import Callable, Iterable

import chosen
import configured
import expect
import pytest
from clocks import Clock
from real.any import AnyHost

from agent import errors, ids
from agent.config.classes import DeviceClass
from agent.config.settings import Config
from agent.csi.client import Client, block, of_snapshot
from agent.delta.extents import BLOCK_BYTES, Extent
from agent.service import server
from agent.service.server import Service
from lvm import errors as lvm_errors
from lvm import report, tags, volumes
from lvm.layout import Reserve
from lvm.pools import Policy
from mount.reading import Reader
from proto import csi_pb2 as csi

KIB, MIB = 1 << 10, 1 << 20
SIZE = 16 * MIB
LAYOUTS = configured.layouts("linear", "striped", "raid1", "thin")


@pytest.fixture
def group(host: AnyHost) -> str:
    return host.new_group(100, 100)


@pytest.fixture
def config(config: Config, group: str) -> Config:
    pool = Policy(over_provisioning=20.0, size=Reserve(size_bytes=64 * MIB))
    classes = tuple(
        DeviceClass(
            *(name, group),
            default=name == "linear",
            layout=layout,
            snapshot_size=Reserve(percent=100),
            pool=pool if layout.is_thin else None,
        )
        for name, layout in LAYOUTS.items()
    )
    return Config(**{**vars(config), "classes": classes})


layouts = pytest.mark.parametrize("layout", chosen.kinds(LAYOUTS, usual=["linear", "thin"]))


class Disk:
    """A raw volume that is written to, and what it and its snapshots must hold."""

    def __init__(self, client: Client, service: Service, host: AnyHost, layout: str) -> None:
        self.client, self.service, self.host = client, service, host
        made = client.create("pvc-1", SIZE, block(), parameters={"class": layout})
        self.id = made.volume_id
        self.group, self.name = ids.group_of(self.id), ids.logical_name(self.id)
        self.layout = layout
        self.held = bytearray()
        self.clear(made.capacity_bytes)
        # What each snapshot held when it was taken.
        self.snapshots: dict[str, bytes] = {}

    def device(self, identity: str) -> str:
        name = ids.logical_name(identity)
        if self.host.devices.find(self.group, name) is None:
            volumes.activate(self.host.lvm, self.group, name)
        found = self.host.devices.find(self.group, name)
        assert found is not None
        return found.path

    def read(self, identity: str, size_bytes: int) -> bytes:
        return self.host.read_bytes(self.device(identity), 0, size_bytes)

    def write(self, at: int, data: bytes) -> None:
        self.host.write_bytes(self.device(self.id), at, data)
        self.held[at : at + len(data)] = data

    def snapshot(self) -> str:
        taken = self.client.snapshot(f"s-{len(self.snapshots)}", self.id)
        self.snapshots[taken.snapshot_id] = bytes(self.held)
        return taken.snapshot_id

    def grow(self) -> None:
        # As much more as its layout needs.
        size = self.client.expand(self.id, len(self.held) + 4 * MIB).capacity_bytes
        self.clear(size)

    def clear(self, size_bytes: int) -> None:
        """What it has new holds zeroes: of a thick one it is what was there before."""
        new = bytes(size_bytes - len(self.held))
        if self.layout != "thin":
            self.host.write_bytes(self.device(self.id), len(self.held), new)
        self.held += new

    def deactivate(self) -> None:
        """As a reboot does: what is needed is activated again."""
        for name in sorted({self.name, *map(ids.logical_name, self.snapshots)}):
            found = report.read(self.host.lvm).group(self.group).volume(name)
            if self.host.devices.find(self.group, name) and not found.is_copy_on_write:
                self.host.deactivate(self.group, name)

    def holds(self, identity: str) -> bytes:
        return self.snapshots.get(identity) or bytes(self.held)


@pytest.fixture
def disk(client: Client, service: Service, host: AnyHost, layout: str) -> Disk:
    return Disk(client, service, host, layout)


def blocks_of(extents: Iterable[Extent], size_bytes: int) -> set[int]:
    """The numbers of the blocks that ranges name, which are in order, and whole blocks."""
    found: set[int] = set()
    end = -1
    for one in extents:
        assert end <= one.offset_bytes < one.end_bytes <= size_bytes, one
        assert not (one.offset_bytes | one.length_bytes) % BLOCK_BYTES, one
        found |= set(range(one.offset_bytes // BLOCK_BYTES, one.end_bytes // BLOCK_BYTES))
        end = one.end_bytes
    return found


def unlike(one: bytes, other: bytes) -> set[int]:
    """The numbers of the blocks in which the second differs; the first is zeroes behind its end."""
    one = one.ljust(len(other), b"\0")
    return {
        at // BLOCK_BYTES
        for at in range(0, len(other), BLOCK_BYTES)
        if one[at : at + BLOCK_BYTES] != other[at : at + BLOCK_BYTES]
    }


def require_exact(disk: Disk) -> None:
    """Each snapshot and the volume hold what they must, and so do all deltas between them."""
    those = [*disk.snapshots, disk.id]
    for number, target in enumerate(those):
        held = disk.holds(target)
        with disk.service.delta.allocated(target) as reading:
            assert reading.size_bytes == len(held)
            assert disk.host.read_bytes(reading.device, 0, len(held)) == held
            named = blocks_of(reading.extents(), len(held))
            assert unlike(b"", held) <= named
        for base in those[:number]:
            with disk.service.delta.changed(base, target) as reading:
                assert disk.host.read_bytes(reading.device, 0, len(held)) == held
                differing = blocks_of(reading.extents(), len(held))
                assert differing == unlike(disk.holds(base), held)
            with disk.service.delta.changed(base, target, is_compared=False) as reading:
                assert differing <= blocks_of(reading.extents(), len(held))
        with disk.service.delta.allocated(target, is_compared=False) as reading:
            assert named <= blocks_of(reading.extents(), len(held))


def write_some(disk: Disk, chance: random.Random) -> None:
    """Writes as programs make them: here and there, in a row, zeroes, and the same once more."""
    for _ in range(chance.randint(0, 12)):
        count = chance.choice((1, 1, 1, 2, 16, 17, 100))
        at = chance.randrange(0, len(disk.held) - count * BLOCK_BYTES, BLOCK_BYTES)
        length = count * BLOCK_BYTES
        kind = chance.choice(("new", "new", "zeroes", "same"))
        data = {
            "new": chance.randbytes(length),
            "zeroes": bytes(length),
            "same": bytes(disk.held[at : at + length]),
        }[kind]
        disk.write(at, data)


@layouts
@pytest.mark.timeout(3600)
def test_random_histories_are_told_to_the_block(
    client: Client,
    service: Service,
    host: AnyHost,
    layout: str,
    real: bool,
    request: pytest.FixtureRequest,
) -> None:
    every = real and request.config.getoption("--every")
    asked = chosen.numbers("CARVER_DELTAS", seed=1, histories=50 if every else 1)
    for number in range(asked["histories"]):
        chance = random.Random(f"{asked['seed']} {layout} {number}")
        disk = Disk(client, service, host, layout)
        for _ in range(chance.randint(3, 7)):
            match chance.choice(("snapshot", "snapshot", "write", "write", "grow", "reboot")):
                case "snapshot":
                    disk.snapshot()
                case "grow":
                    disk.grow()
                case "reboot":
                    disk.deactivate()
            write_some(disk, chance)
        if chance.random() < 0.5:
            disk.deactivate()
        require_exact(disk)
        for one in disk.snapshots:
            client.delete_snapshot(one)
        client.delete(disk.id)


@layouts
def test_what_was_written_between_two_snapshots_is_named_and_nothing_else(disk: Disk) -> None:
    disk.write(0, b"a" * 8192)
    older = disk.snapshot()
    disk.write(4096, b"b" * 4096)
    disk.write(8 * MIB, b"c" * 4096)
    newer = disk.snapshot()
    disk.write(12 * MIB, b"d" * 4096)
    with disk.service.delta.changed(older, newer) as reading:
        assert list(reading.extents()) == [Extent(4096, 4096), Extent(8 * MIB, 4096)]
        # From within a range on, from its end, from the end of all.
        assert list(reading.extents(8 * MIB)) == [Extent(8 * MIB, 4096)]
        assert list(reading.extents(8 * MIB + 512)) == [Extent(8 * MIB + 512, 3584)]
        assert list(reading.extents(8 * MIB + 4096)) == []
        assert list(reading.extents(SIZE)) == []
        with pytest.raises(errors.NotBeyond):
            reading.extents(SIZE + 1)
    with disk.service.delta.changed(newer, disk.id) as reading:
        assert list(reading.extents()) == [Extent(12 * MIB, 4096)]


@pytest.mark.variation
@layouts
def test_what_was_written_and_is_the_same_has_not_changed(disk: Disk) -> None:
    disk.write(0, b"a" * 4096)
    older = disk.snapshot()
    disk.write(0, b"b" * 4096)
    disk.write(0, b"a" * 4096)
    disk.write(4096, bytes(4096))
    with disk.service.delta.changed(older, disk.snapshot()) as reading:
        assert list(reading.extents()) == []


@pytest.mark.variation
@layouts
def test_growth_between_snapshots_counts_as_zeroes(disk: Disk) -> None:
    older = disk.snapshot()
    disk.grow()
    disk.write(SIZE, b"a" * 4096)
    newer = disk.snapshot()
    with disk.service.delta.changed(older, newer) as reading:
        assert reading.size_bytes == len(disk.held) > SIZE
        assert list(reading.extents()) == [Extent(SIZE, 4096)]
    with disk.service.delta.allocated(older) as reading:
        assert reading.size_bytes == SIZE


@pytest.mark.variation
@layouts
def test_a_snapshot_compared_with_itself_has_not_changed(disk: Disk) -> None:
    disk.write(0, b"a" * 4096)
    taken = disk.snapshot()
    disk.write(0, b"b" * 4096)
    with disk.service.delta.changed(taken, taken) as reading:
        assert list(reading.extents()) == []


@pytest.mark.variation
@layouts
def test_what_is_read_cannot_be_deleted_meanwhile(disk: Disk, client: Client) -> None:
    older, newer = disk.snapshot(), disk.snapshot()
    with disk.service.delta.changed(older, newer) as reading:
        for one in (older, newer):
            with expect.code("FAILED_PRECONDITION"):
                client.delete_snapshot(one)
        assert list(reading.extents()) == []
    client.delete_snapshot(older)


@pytest.mark.variation
@layouts
def test_a_restored_volume_is_another_and_is_not_compared(disk: Disk, client: Client) -> None:
    taken = disk.snapshot()
    source = of_snapshot(taken)
    parameters = {"class": disk.layout}
    restored = client.create("pvc-2", SIZE, block(), source=source, parameters=parameters)
    other = client.snapshot("other", restored.volume_id)
    for one in (restored.volume_id, other.snapshot_id):
        with (
            pytest.raises(errors.NotComparable, match="the one is of"),
            disk.service.delta.changed(taken, one),
        ):
            pass


# The order in which snapshots were taken, whatever the clock says.

HOURS = 3600.0


def forget_order(disk: Disk, snapshot_id: str) -> None:
    """Have a snapshot be as Carver 0.1.0 took it: without its number."""
    name = ids.logical_name(snapshot_id)
    found = report.read(disk.host.lvm).group(disk.group).volume(name)
    number = {"sequence": tags.decode(found.tags)["sequence"]}
    volumes.mark(disk.host.lvm, disk.group, name, old=number, new={})


@layouts
@pytest.mark.parametrize("hours", chosen.kinds([-2, 0, 2], usual=[-2]))
def test_a_step_of_the_clock_has_no_say_in_what_differs(
    disk: Disk, client: Client, clock: Clock, hours: int
) -> None:
    disk.write(0, b"a" * 4096)
    older = disk.snapshot()
    clock.step(hours * HOURS)
    disk.write(4096, b"b" * 4096)
    newer = disk.snapshot()
    disk.write(8192, b"c" * 4096)
    require_exact(disk)
    with disk.service.delta.changed(older, newer) as reading:
        assert list(reading.extents()) == [Extent(4096, 4096)]
    with expect.code("INVALID_ARGUMENT", "taken later"):
        changed(client, newer, older)


@pytest.mark.variation
@layouts
def test_two_snapshots_of_one_moment_are_told_apart(
    disk: Disk, client: Client, clock: Clock
) -> None:
    clock.stand()
    taken = []
    for number in range(3):
        disk.write(number * 4096, b"a" * 4096)
        taken.append(disk.snapshot())
    require_exact(disk)
    with expect.code("INVALID_ARGUMENT", "taken later"):
        changed(client, taken[2], taken[1])


@layouts
@pytest.mark.parametrize("which", chosen.kinds(["older", "newer", "both"], usual=["both"]))
def test_snapshots_without_a_number_are_ordered_by_what_lvm_knows(
    disk: Disk, client: Client, clock: Clock, which: str
) -> None:
    disk.write(0, b"a" * 4096)
    older = disk.snapshot()
    clock.step(-2 * HOURS)
    disk.write(4096, b"b" * 4096)
    newer = disk.snapshot()
    disk.write(8192, b"c" * 4096)
    for name, one in (("older", older), ("newer", newer)):
        if which in (name, "both"):
            forget_order(disk, one)
    require_exact(disk)
    if disk.layout == "thin":
        with expect.code("INVALID_ARGUMENT", "taken later"):
            changed(client, newer, older)
    else:
        # Nobody knows: both tables are read, and it is as exact backwards.
        assert told(changed(client, newer, older)) == [Extent(4096, 4096)]
    third = disk.snapshot()
    with expect.code("INVALID_ARGUMENT", "taken later"):
        changed(client, disk.snapshot(), third)


# The pool's metadata snapshot.


def has_mark(disk: Disk) -> bool:
    pool = report.read(disk.host.lvm).group(disk.group).volume("pool-thin")
    return "metadataSnapshot" in tags.decode(pool.tags)


def is_reserved(disk: Disk) -> bool:
    [pool] = disk.host.devices.status(disk.group, disk.name)
    return bool(getattr(pool, "has_metadata_snapshot"))  # noqa: B009 - of one of many kinds


thin = pytest.mark.parametrize("layout", ["thin"])


@thin
def test_a_pool_s_metadata_are_let_go_of_before_anything_is_told(disk: Disk) -> None:
    disk.write(0, b"a" * 4096)
    taken = disk.snapshot()
    with disk.service.delta.allocated(taken) as reading:
        assert not is_reserved(disk)
        assert not has_mark(disk)
        assert list(reading.extents()) == [Extent(0, 64 * KIB)]


@pytest.mark.variation
@thin
def test_what_somebody_else_reserved_is_told_and_left_alone(disk: Disk) -> None:
    taken = disk.snapshot()
    disk.host.devices.reserve_metadata(disk.group, "pool-thin")
    with (
        pytest.raises(errors.MetadataReserved, match="not Carver's"),
        disk.service.delta.allocated(taken),
    ):
        pass
    assert disk.service.delta.reservations.resume() == 0
    assert is_reserved(disk)
    assert not has_mark(disk)
    disk.host.devices.release_metadata(disk.group, "pool-thin")
    with disk.service.delta.allocated(taken) as reading:
        assert list(reading.extents()) == []


@pytest.mark.variation
@thin
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("reserved", [True, False])
def test_what_a_kill_left_is_released_by_the_next_start(
    disk: Disk, active: bool, reserved: bool
) -> None:
    taken = disk.snapshot()
    mark = {"metadataSnapshot": "reserved"}
    volumes.mark(disk.host.lvm, disk.group, "pool-thin", old={}, new=mark)
    if reserved:
        disk.host.devices.reserve_metadata(disk.group, "pool-thin")
    if not active:
        disk.deactivate()
        disk.host.deactivate(disk.group, "pool-thin")
    server.resume(disk.service)
    disk.device(disk.id)
    assert not is_reserved(disk)
    assert not has_mark(disk)
    with disk.service.delta.allocated(taken) as reading:
        assert list(reading.extents()) == []


@thin
def test_a_snapshot_that_is_newer_than_what_is_reserved_is_read_by_a_reservation_of_its_own(
    disk: Disk,
) -> None:
    """What a reading left, since it could not let go, does not have it."""
    mark = {"metadataSnapshot": "reserved"}
    volumes.mark(disk.host.lvm, disk.group, "pool-thin", old={}, new=mark)
    disk.host.devices.reserve_metadata(disk.group, "pool-thin")
    disk.write(0, b"a" * 4096)
    with disk.service.delta.allocated(disk.snapshot()) as reading:
        assert list(reading.extents()) == [Extent(0, 64 * KIB)]
    assert not is_reserved(disk)
    assert not has_mark(disk)


# Over the socket.


Answers = list[csi.GetMetadataAllocatedResponse] | list[csi.GetMetadataDeltaResponse]


def allocated(
    client: Client, snapshot_id: str, start: int = 0, results: int = 0
) -> list[csi.GetMetadataAllocatedResponse]:
    request = csi.GetMetadataAllocatedRequest(
        snapshot_id=snapshot_id, starting_offset=start, max_results=results
    )
    return list(client.snapshot_metadata.GetMetadataAllocated(request))


def changed(
    client: Client, base_id: str, target_id: str, start: int = 0, results: int = 0
) -> list[csi.GetMetadataDeltaResponse]:
    request = csi.GetMetadataDeltaRequest(
        base_snapshot_id=base_id,
        target_snapshot_id=target_id,
        starting_offset=start,
        max_results=results,
    )
    return list(client.snapshot_metadata.GetMetadataDelta(request))


def told(answers: Answers) -> list[Extent]:
    return [Extent(b.byte_offset, b.size_bytes) for one in answers for b in one.block_metadata]


@layouts
def test_what_was_written_is_told_without_a_look_at_it(
    disk: Disk, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = disk.snapshot()
    disk.write(MIB, bytes(disk.held[MIB : MIB + 4096]))
    newer = disk.snapshot()
    # As it was: written all the same.
    assert told(changed(client, older, newer)) == []

    def refuse(*_: object) -> bytes:
        raise AssertionError("it was read")

    monkeypatch.setattr(Reader, "read", refuse)
    [(at, length)] = client.blocks(newer, older, is_compared=False)
    assert at == MIB
    assert length in (4096, 64 * KIB)
    covered = [Extent(*one) for one in client.blocks(newer, is_compared=False)]
    assert MIB // BLOCK_BYTES in blocks_of(covered, SIZE)
    assert list(client.blocks(newer, older, MIB + length, is_compared=False)) == []


@pytest.mark.variation
@layouts
def test_ranges_are_streamed_so_many_at_a_time(disk: Disk, client: Client) -> None:
    older = disk.snapshot()
    wanted = [Extent(number * MIB, 4096) for number in range(7)]
    for one in wanted:
        disk.write(one.offset_bytes, b"a" * 4096)
    newer = disk.snapshot()
    answers = changed(client, older, newer, results=3)
    assert [len(one.block_metadata) for one in answers] == [3, 3, 1]
    assert told(answers) == wanted
    assert {one.volume_capacity_bytes for one in answers} == {SIZE}
    assert {one.block_metadata_type for one in answers} == {csi.VARIABLE_LENGTH}
    # An interrupted stream is taken up behind its last range.
    assert told(changed(client, older, newer, wanted[3].end_bytes)) == wanted[4:]
    assert told(changed(client, older, newer, wanted[3].end_bytes - 1))[0].length_bytes == 1
    covered = blocks_of(told(allocated(client, newer, results=2)), SIZE)
    assert {one.offset_bytes // BLOCK_BYTES for one in wanted} <= covered


@pytest.mark.variation
@layouts
def test_nothing_to_tell_is_one_answer_with_the_size(disk: Disk, client: Client) -> None:
    older, newer = disk.snapshot(), disk.snapshot()
    [answer] = changed(client, older, newer)
    assert (answer.volume_capacity_bytes, len(answer.block_metadata)) == (SIZE, 0)
    [empty] = allocated(client, newer, start=SIZE)
    assert (empty.volume_capacity_bytes, len(empty.block_metadata)) == (SIZE, 0)


def test_the_service_is_announced(client: Client) -> None:
    answer = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
    offered = [one.service.type for one in answer.capabilities]
    assert csi.PluginCapability.Service.SNAPSHOT_METADATA_SERVICE in offered


Refused = tuple[str, str, Callable[[Client, str, str, str], object]]
REFUSALS: dict[str, Refused] = {
    "no snapshot_id": (
        *("INVALID_ARGUMENT", "snapshot_id"),
        lambda client, *_: allocated(client, ""),
    ),
    "no base_snapshot_id": (
        *("INVALID_ARGUMENT", "base_snapshot_id"),
        lambda client, _old, new, _volume: changed(client, "", new),
    ),
    "no target_snapshot_id": (
        *("INVALID_ARGUMENT", "target_snapshot_id"),
        lambda client, old, *_: changed(client, old, ""),
    ),
    "max_results": (
        *("INVALID_ARGUMENT", "max_results"),
        lambda client, old, *_: allocated(client, old, results=-1),
    ),
    "no such snapshot": (
        *("NOT_FOUND", "no snapshot"),
        lambda client, old, *_: allocated(client, f"{old}x"),
    ),
    "no id": ("NOT_FOUND", "no snapshot", lambda client, *_: allocated(client, "snap-1")),
    "a volume": (
        *("NOT_FOUND", "no snapshot"),
        lambda client, _old, _new, volume: allocated(client, volume),
    ),
    "no such base": (
        *("NOT_FOUND", "no snapshot"),
        lambda client, old, new, _volume: changed(client, f"{old}x", new),
    ),
    "no such target": (
        *("NOT_FOUND", "no snapshot"),
        lambda client, old, new, _volume: changed(client, old, f"{new}x"),
    ),
    "the volume as target": (
        *("NOT_FOUND", "no snapshot"),
        lambda client, old, _new, volume: changed(client, old, volume),
    ),
    "a negative offset": (
        *("OUT_OF_RANGE", "starting_offset"),
        lambda client, old, *_: allocated(client, old, start=-1),
    ),
    "an offset behind the end": (
        *("OUT_OF_RANGE", str(SIZE)),
        lambda client, old, *_: allocated(client, old, start=SIZE + 1),
    ),
    "an offset behind the end of two": (
        *("OUT_OF_RANGE", str(SIZE)),
        lambda client, old, new, _volume: changed(client, old, new, start=SIZE + 1),
    ),
    "the base is newer": (
        *("INVALID_ARGUMENT", "taken later"),
        lambda client, old, new, _volume: changed(client, new, old),
    ),
    "of another group": (
        *("FAILED_PRECONDITION", "not on this node"),
        lambda client, old, *_: allocated(client, f"x{old}"),
    ),
}


@pytest.mark.variation
@pytest.mark.parametrize("why", chosen.kinds(REFUSALS, usual=["no such snapshot", "a volume"]))
@pytest.mark.parametrize("layout", ["linear"])
def test_what_cannot_be_told_is_refused(disk: Disk, client: Client, why: str) -> None:
    old, new = disk.snapshot(), disk.snapshot()
    code, word, ask = REFUSALS[why]
    with expect.code(code, word):
        ask(client, old, new, disk.id)


@pytest.mark.variation
@layouts
def test_snapshots_of_two_volumes_are_not_compared(disk: Disk, client: Client) -> None:
    other = client.create("pvc-2", SIZE, block())
    second = client.snapshot("other", other.volume_id)
    with expect.code("INVALID_ARGUMENT", "pvc-1", "pvc-2"):
        changed(client, disk.snapshot(), second.snapshot_id)


@pytest.mark.parametrize("layout", ["linear"])
def test_a_snapshot_that_overflows_is_told_as_lost(disk: Disk, client: Client) -> None:
    taken = client.snapshot("small", disk.id, {"size": "4Mi"}).snapshot_id
    newer = client.snapshot("large", disk.id).snapshot_id
    for at in range(0, 8 * MIB, 64 * KIB):
        disk.write(at, b"a" * 64 * KIB)
    for ask in (lambda: allocated(client, taken), lambda: changed(client, taken, newer)):
        with expect.code("FAILED_PRECONDITION", "lost"):
            ask()


@pytest.mark.variation
@pytest.mark.parametrize("layout", ["linear"])
def test_a_snapshot_that_overflows_while_it_is_read_is_told_as_lost(
    disk: Disk, client: Client
) -> None:
    disk.write(0, b"a" * MIB)
    taken = client.snapshot("small", disk.id, {"size": "4Mi"}).snapshot_id
    with disk.service.delta.allocated(taken) as reading:
        extents = reading.extents()
        for at in range(0, 8 * MIB, 64 * KIB):
            disk.write(at, b"b" * 64 * KIB)
        with pytest.raises(errors.SourceLost):
            list(extents)


@pytest.mark.variation
@layouts
def test_a_stream_that_is_cancelled_lets_go_of_everything(disk: Disk, client: Client) -> None:
    older = disk.snapshot()
    for number in range(200):
        disk.write(number * 64 * KIB, b"a" * 4096)
    newer = disk.snapshot()
    request = csi.GetMetadataDeltaRequest(
        base_snapshot_id=older, target_snapshot_id=newer, max_results=1
    )
    stream = client.snapshot_metadata.GetMetadataDelta(request)
    assert len(next(stream).block_metadata) == 1
    stream.cancel()
    with expect.code("CANCELLED"):
        list(stream)
    _until(lambda: not _is_open(disk, older))
    assert not _is_open(disk, newer)
    client.delete_snapshot(older)


def _is_open(disk: Disk, identity: str) -> bool:
    return disk.host.devices.is_open(disk.group, ids.logical_name(identity))


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def started(disk: Disk) -> list[str]:
    words = [" ".join(one[:2]) if one[0] == "lvm" else one[0] for one in disk.host.commands]
    disk.host.commands.clear()
    return words


@pytest.mark.variation
@layouts
def test_a_call_costs_what_the_design_says(disk: Disk, client: Client, layout: str) -> None:
    older, newer = disk.snapshot(), disk.snapshot()
    started(disk)
    allocated(client, newer)
    mark, look = "lvm lvchange", "lvm fullreport"
    activate = [mark] if layout == "thin" else []
    is_thin = layout == "thin"
    assert started(disk) == [look, *activate, *([mark, "thin_dump", mark] if is_thin else [])]
    changed(client, older, newer)
    # What the mark changed is looked at, and the older one is activated.
    of_thin = [look, *activate, mark, "thin_delta", mark]
    assert started(disk) == (of_thin if is_thin else [])


@thin
def test_a_program_that_fails_is_told_and_nothing_stays_reserved(
    disk: Disk, host: AnyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = disk.snapshot()
    # A number that no volume of the pool has.
    monkeypatch.setattr(type(host.devices), "thin_id", lambda *_: 99)
    with (
        pytest.raises(lvm_errors.BadReport, match="do not have the volume"),
        disk.service.delta.allocated(taken),
    ):
        pass
    assert not is_reserved(disk)
    assert not has_mark(disk)


@pytest.mark.variation
def test_streams_end_when_the_service_does(client: Client, service: Service, host: AnyHost) -> None:
    disk = Disk(client, service, host, "linear")
    taken = disk.snapshot()
    with service.delta.allocated(taken) as reading:
        service.delta.stop()
        with pytest.raises(errors.OperationPending):
            list(reading.extents())
