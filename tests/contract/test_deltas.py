"""What is allocated in a snapshot and what changed since another: exactly that, by CSI.

CARVER_DELTAS=seed=7,histories=50 asks for other random histories, and more of them, of each kind;
on real LVM with --every there are 17.
"""

import random
import time
import uuid
from collections.abc import Callable, Iterable

import chosen
import configured
import expect
import histories
import in_background
import pytest
from changed_blocks import allocated_extents, blocks, changed_extents, delta_of
from clocks import Clock
from fakes.cryptsetup import copies
from histories import KEY, KIB, MIB, SEALED, SIZE, Disk, live, unlike
from real.any import AnyHost

from agent.core import errors, ids
from agent.csi.client import Client, block, of_snapshot
from agent.daemon.server import Service
from agent.extras.changed_blocks import changed_blocks_service as changed_blocks
from agent.extras.changed_blocks import comparing
from agent.extras.changed_blocks.extents import BLOCK_BYTES, Extent, LogicalOffset, UserExtent
from agent.extras.transfer import streams_command
from agent.settings.classes import DeviceClass
from lvm import report, volumes
from lvm.layout import Reserve
from lvm.thin import Policy
from mount import luks
from mount import mount_errors as mount_errors
from mount.luks import Cryptsetup
from proto import csi_pb2 as csi
from proto.csi_pb2_grpc import SnapshotMetadataStub

LAYOUTS = configured.layouts("linear", "striped", "raid1", "thin")
POOL = Policy(over_provisioning=20.0, size=Reserve(size_bytes=64 * MIB))
CLASSES = tuple(
    DeviceClass(
        *(name, "data"),
        default=name == "linear",
        layout=layout,
        snapshot_size=Reserve(percent=100),
        pool=POOL if layout.is_thin else None,
    )
    for name, layout in LAYOUTS.items()
)
pytestmark = [
    pytest.mark.groups(data=[100, 100]),
    pytest.mark.settings(classes=histories.sealed(CLASSES)),
]


layouts = pytest.mark.parametrize("layout", chosen.kinds(LAYOUTS, usual=["linear", "thin"]))
one_layout = pytest.mark.parametrize("layout", chosen.kinds(LAYOUTS, usual=["thin"]))


@pytest.fixture
def disk(client: Client, service: Service, host: AnyHost, layout: str) -> Disk:
    return Disk(client, service, host, layout)


def blocks_of(extents: Iterable[Extent | UserExtent], size_bytes: int) -> set[int]:
    """The numbers of the blocks that ranges name, which are in order, and whole blocks."""
    found: set[int] = set()
    end = -1
    for one in extents:
        start = one.offset_bytes
        assert end <= start < start + one.length_bytes <= size_bytes, one
        assert not (start | one.length_bytes) % BLOCK_BYTES, one
        end = start + one.length_bytes
        found |= set(range(start // BLOCK_BYTES, end // BLOCK_BYTES))
    return found


def require_exact(disk: Disk, some: random.Random | None = None) -> None:
    """Each snapshot and the volume hold what they must, and so do all deltas between them.

    Of many pairs `some` are looked at: of each with the one before, and another.
    """
    those = [*disk.snapshots, disk.id]
    for number, target in enumerate(those):
        held = disk.holds(target)
        assert disk.read(target) == held
        with delta_of(disk).allocated(target) as reading:
            seen = reading.for_user()
            assert seen.size_bytes == len(held)
            allocated = blocks_of(seen.extents(), len(held))
            # Unwritten blocks of an encrypted volume are noise, not zeroes.
            assert (disk.has_written(target) if disk.is_sealed else unlike(b"", held)) <= allocated
            logical = blocks_of(reading.extents(), reading.size_bytes)
        with delta_of(disk).allocated(target, is_compared=False) as reading:
            assert logical <= blocks_of(reading.extents(), reading.size_bytes)
        bases = those[:number]
        if some is not None and len(bases) > 2:
            bases = [bases[-1], some.choice(bases[:-1])]
        for base in bases:
            require_exact_delta(disk, base, target)


def require_exact_delta(disk: Disk, base: str, target: str) -> None:
    """What differs is named, to the user and in the logical volume, and nothing else is."""
    old, new = disk.holds(base), disk.holds(target)
    with delta_of(disk).changed(base, target) as reading:
        named = blocks_of(reading.for_user().extents(), len(new))
        logical = blocks_of(reading.extents(), reading.size_bytes)
        lies = disk.lies(target, reading.size_bytes)
    with delta_of(disk).changed(base, target, is_compared=False) as reading:
        assert logical <= blocks_of(reading.extents(), reading.size_bytes)
    if not disk.is_sealed:
        assert named == logical == unlike(old, new)
        return
    # What it grew by is not compared, as there are no zeroes to compare it with.
    was = len(old) // BLOCK_BYTES
    assert {one for one in named if one < was} == unlike(old, new[: len(old)])
    assert {one for one in disk.has_written(target) if one >= was} <= named
    before = disk.lies(base, reading.size_bytes - len(new) + len(old))
    end = len(before) // BLOCK_BYTES
    differing = unlike(before, lies[: len(before)])
    assert {one for one in logical if one < end} == differing, (base, target, [*disk.snapshots])


def require_backups_hold_all(disk: Disk) -> None:
    """A full backup and what changed since, put on zeroes, hold what was written."""
    kept, base = bytearray(), ""
    for target in disk.snapshots:
        held = disk.holds(target)
        kept += bytes(len(held) - len(kept))
        for one in blocks(disk.client, target, base):
            start, end = one.offset_bytes, one.offset_bytes + one.length_bytes
            kept[start:end] = held[start:end]
        base = target
        if disk.is_sealed:
            assert not unlike(bytes(kept), held) & disk.has_written(target)
        else:
            assert kept == held


@pytest.mark.parametrize(
    "layout",
    chosen.kinds(
        [*LAYOUTS, *(f"{SEALED}{name}" for name in LAYOUTS)],
        usual=["sealed-thin"],
        fast=["linear", "sealed-raid1", "striped"],
    ),
)
@pytest.mark.timeout(7200)
@pytest.mark.long_on_lvm
def test_random_histories_are_reported_to_the_block(
    client: Client,
    service: Service,
    host: AnyHost,
    layout: str,
    clock: Clock,
    real: bool,
    request: pytest.FixtureRequest,
) -> None:
    every = real and request.config.getoption("--every")
    asked = chosen.numbers("CARVER_DELTAS", seed=1, histories=17 if every else 1)
    for number in range(asked["histories"]):
        chance = random.Random(f"{asked['seed']} {layout} {number}")
        disk = Disk(client, service, host, layout)
        live(disk, clock, chance)
        require_exact(disk, chance)
        require_backups_hold_all(disk)
        disk.end()


@layouts
def test_a_delta_has_what_was_written_between_two_snapshots(disk: Disk) -> None:
    disk.write(0, b"a" * 8192)
    older = disk.snapshot()
    disk.write(4096, b"b" * 4096)
    disk.write(8 * MIB, b"c" * 4096)
    newer = disk.snapshot()
    disk.write(12 * MIB, b"d" * 4096)
    with delta_of(disk).changed(older, newer) as reading:
        assert list(reading.extents()) == [Extent(4096, 4096), Extent(8 * MIB, 4096)]
        # From within a range on, from its end, from the end of all.
        assert list(reading.extents(LogicalOffset(8 * MIB))) == [Extent(8 * MIB, 4096)]
        assert list(reading.extents(LogicalOffset(8 * MIB + 512))) == [Extent(8 * MIB + 512, 3584)]
        assert list(reading.extents(LogicalOffset(8 * MIB + 4096))) == []
        assert list(reading.extents(LogicalOffset(SIZE))) == []
        with pytest.raises(errors.OffsetOutOfRange):
            reading.extents(LogicalOffset(SIZE + 1))
    assert changed_extents(disk, newer, disk.id) == [Extent(12 * MIB, 4096)]


@pytest.mark.variation
@layouts
def test_equal_blocks_have_not_changed(disk: Disk) -> None:
    disk.write(0, b"a" * 4096)
    older = disk.snapshot()
    disk.write(0, b"b" * 4096)
    assert changed_extents(disk, older, older) == []
    disk.write(0, b"a" * 4096)
    disk.write(4096, bytes(4096))
    assert changed_extents(disk, older, disk.snapshot()) == []


@pytest.mark.variation
@layouts
def test_growth_between_snapshots_counts_as_zeroes(disk: Disk) -> None:
    older = disk.snapshot()
    disk.grow()
    disk.write(SIZE, b"a" * 4096)
    newer = disk.snapshot()
    with delta_of(disk).changed(older, newer) as reading:
        assert reading.size_bytes == len(disk.held) > SIZE
        assert list(reading.extents()) == [Extent(SIZE, 4096)]
    with delta_of(disk).allocated(older) as reading:
        assert reading.size_bytes == SIZE


@pytest.mark.variation
@layouts
def test_what_is_read_cannot_be_deleted_meanwhile(disk: Disk, client: Client) -> None:
    older, newer = disk.snapshot(), disk.snapshot()
    with delta_of(disk).changed(older, newer) as reading:
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
    with pytest.raises(errors.NotComparable, match="it is of"):
        changed_extents(disk, taken, restored.volume_id)
    with expect.code("INVALID_ARGUMENT", "pvc-1", "pvc-2"):
        changed(client, taken, other.snapshot_id)


# The order in which snapshots were taken, whatever the clock says.

HOURS = 3600.0


@pytest.mark.variation
@one_layout
@pytest.mark.parametrize("hours", [-2, 0, 2])
def test_a_step_of_the_clock_changes_no_delta(
    disk: Disk, client: Client, clock: Clock, hours: int
) -> None:
    disk.write(0, b"a" * 4096)
    older = disk.snapshot()
    clock.step(hours * HOURS)
    disk.write(4096, b"b" * 4096)
    newer = disk.snapshot()
    disk.write(8192, b"c" * 4096)
    require_exact(disk)
    assert changed_extents(disk, older, newer) == [Extent(4096, 4096)]
    with expect.code("INVALID_ARGUMENT", "taken later"):
        changed(client, newer, older)


@pytest.mark.variation
@layouts
def test_snapshots_of_one_moment_are_distinguished(
    disk: Disk, client: Client, clock: Clock
) -> None:
    with clock.standing():
        taken = []
        for number in range(3):
            disk.write(number * 4096, b"a" * 4096)
            taken.append(disk.snapshot())
    require_exact(disk)
    with expect.code("INVALID_ARGUMENT", "taken later"):
        changed(client, taken[2], taken[1])


@pytest.mark.variation
@one_layout
@pytest.mark.parametrize("which", ["older", "newer", "both"])
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
            disk.forget_order(one)
    require_exact(disk)
    if disk.layout == "thin":
        with expect.code("INVALID_ARGUMENT", "taken later"):
            changed(client, newer, older)
    else:
        # Their order is unknown: both tables are read, and it is as exact backwards.
        assert ranges_of(changed(client, newer, older)) == [Extent(4096, 4096)]
    third = disk.snapshot()
    with expect.code("INVALID_ARGUMENT", "taken later"):
        changed(client, disk.snapshot(), third)


# Encrypted volumes, as their users see them.

OTHER = {"passphrase": "Tr0ub4dor&3", "previousPassphrase": KEY["passphrase"]}
sealed = pytest.mark.parametrize(
    "layout",
    chosen.kinds([f"{SEALED}{one}" for one in LAYOUTS], usual=["sealed-thin"]),
)


@pytest.mark.variation
@sealed
def test_blocks_of_an_encrypted_volume_are_those_that_its_user_reads(
    disk: Disk, client: Client, host: AnyHost
) -> None:
    disk.write(0, b"a" * 4096)
    older = disk.snapshot()
    disk.write(4 * MIB, b"b" * 4096)
    disk.write(len(disk.held) - 4096, b"c" * 4096)
    newer = disk.snapshot()
    wanted = [Extent(4 * MIB, 4096), Extent(len(disk.held) - 4096, 4096)]
    answers = changed(client, older, newer)
    assert {one.volume_capacity_bytes for one in answers} == {disk.volume.capacity_bytes}
    assert ranges_of(answers) == wanted
    assert ranges_of(changed(client, older, newer, 4 * MIB + 1)) == [
        Extent(4 * MIB + 1, 4095),
        wanted[1],
    ]
    whole = allocated(client, newer)
    assert {one.volume_capacity_bytes for one in whole} == {disk.volume.capacity_bytes}
    last = len(disk.held) // BLOCK_BYTES - 1
    assert {0, MIB // 1024, last} <= blocks_of(ranges_of(whole), len(disk.held))
    with expect.code("OUT_OF_RANGE", str(len(disk.held))):
        allocated(client, newer, len(disk.held) + 1)
    # What a backup program reads: volumes that were made of the snapshots.
    held = []
    for number, one in enumerate((older, newer)):
        restored = client.create(
            f"r-{number}",
            0,
            block(),
            parameters={"class": disk.device_class},
            source=of_snapshot(one),
        )
        place = host.directory / f"r-{number}"
        client.stage(restored, place, block(), KEY)
        below = host.devices.find(disk.group, f"vol-r-{number}")
        assert below is not None
        opened = host.devices.mapping(below)
        assert opened is not None
        held.append(host.read_bytes(opened.path, 0, restored.capacity_bytes))
        client.unstage(restored.volume_id, place)
    # Their unwritten ends are blank.
    inside = set(range(64, last - 63)) | {0, last}
    assert unlike(*held) & inside == blocks_of(wanted, len(disk.held))


@pytest.mark.variation
@sealed
def test_another_passphrase_changes_no_block(disk: Disk, client: Client, host: AnyHost) -> None:
    disk.write(MIB, b"a" * 4096)
    older = disk.snapshot()
    client.unstage(disk.id, host.directory / "staging")
    client.stage(disk.volume, host.directory / "staging", block(), OTHER)
    disk.write(2 * MIB, b"b" * 4096)
    newer = disk.snapshot()
    # Its ends may have been written when it was opened.
    [one] = [one for one in ranges_of(changed(client, older, newer)) if one.offset_bytes >= MIB]
    assert one == Extent(2 * MIB, 4096)
    # The header is another, which a stream has.
    assert any(one.offset_bytes < 4 * MIB for one in streams_command.extents(client, newer, older))


def made_anew(disk: Disk, host: AnyHost, offset_bytes: int) -> None:
    """Another header than the volume's, and so another master key, or data elsewhere."""
    program = Cryptsetup(host.run, waits_for_udev=luks.has_udev())
    device, key = disk.logical(disk.id), bytearray(KEY["passphrase"].encode())
    own = str(uuid.uuid4())
    program.make(device, key, uuid=own, offset_bytes=offset_bytes, sector_bytes=512)


def says(disk: Disk, host: AnyHost, offset_bytes: int, *requirements: str) -> None:
    """A header that cryptsetup could have written."""
    shape = {"type": "crypt", "offset": str(offset_bytes), "size": "dynamic", "sector_size": 512}
    header = {
        "segments": {"0": {**shape, "encryption": "aes-xts-plain64", "iv_tweak": "0"}},
        "keyslots": {"0": {"type": "luks2", "kdf": {"type": "argon2id"}}},
        "digests": {"0": {"keyslots": ["0"], "segments": ["0"]}},
        "config": {"requirements": {"mandatory": list(requirements)}},
    }
    put(disk, host, *copies(str(uuid.uuid4()), header))


def put(disk: Disk, host: AnyHost, *both: bytes) -> None:
    """What stands where a header's two copies do."""
    for number, one in enumerate(both):
        host.write_bytes(disk.logical(disk.id), number * len(one), one)


NOTHING, HALF = bytes(16 * KIB), b"LUKS\xba\xbe".ljust(16 * KIB, b"\0")
Spoil = Callable[[Disk, AnyHost, int], None]
# What is done to a volume, why there is no delta, and whether it can be read by itself.
SPOILT: dict[str, tuple[Spoil, str, bool]] = {
    "another master key": (made_anew, "another master key", True),
    "data elsewhere": (lambda disk, host, at: made_anew(disk, host, 2 * at), "elsewhere", True),
    "inside a block": (lambda disk, host, at: says(disk, host, at + 512), "inside a block", False),
    "during a re-encryption": (
        lambda disk, host, at: says(disk, host, at, "online-reencrypt-v2"),
        "during a re-encryption",
        False,
    ),
    "no header": (lambda disk, host, _: put(disk, host, NOTHING, NOTHING), "not there", False),
    "half a header": (lambda disk, host, _: put(disk, host, HALF, NOTHING), "not whole", False),
}


@pytest.mark.parametrize("how", chosen.kinds(SPOILT, usual=["another master key"]))
@pytest.mark.parametrize("layout", [f"{SEALED}linear"])
def test_encrypted_snapshots_with_unlike_headers_are_refused(
    disk: Disk, client: Client, host: AnyHost, how: str
) -> None:
    spoil, word, is_readable = SPOILT[how]
    disk.write(MIB, b"a" * 4096)
    older = disk.snapshot()
    header = luks.read(host.kernel, disk.logical(disk.id))
    assert header is not None
    client.unstage(disk.id, host.directory / "staging")
    spoil(disk, host, header.offset_bytes)
    newer = client.snapshot("newer", disk.id).snapshot_id
    with expect.code("FAILED_PRECONDITION", word):
        changed(client, older, newer)
    if is_readable:
        allocated(client, newer)
    else:
        with expect.code("FAILED_PRECONDITION", word):
            allocated(client, newer)
    # Each by itself is as before, and so is the logical volume.
    assert ranges_of(allocated(client, older))
    assert list(streams_command.extents(client, newer, older))


@pytest.mark.variation
@sealed
def test_an_unused_encrypted_volume_has_a_size_and_is_no_base(
    client: Client, host: AnyHost, layout: str
) -> None:
    volume = client.create("pvc-1", SIZE, block(), parameters={"class": layout})
    unused = client.snapshot("unused", volume.volume_id).snapshot_id
    again = client.snapshot("again", volume.volume_id).snapshot_id
    for answers in (allocated(client, unused), changed(client, unused, again)):
        assert {one.volume_capacity_bytes for one in answers} == {volume.capacity_bytes}
    client.stage(volume, host.directory / "staging", block(), KEY)
    used = client.snapshot("used", volume.volume_id).snapshot_id
    with expect.code("FAILED_PRECONDITION", "full backup"):
        changed(client, unused, used)
    assert allocated(client, used)


# The pool's metadata snapshot.


def has_mark(disk: Disk) -> bool:
    pool = report.read(disk.host.lvm).group(disk.group).volume("pool-thin")
    return "metadataSnapshot" in pool.own_tags


def is_reserved(disk: Disk) -> bool:
    [pool] = disk.host.devices.status(disk.group, disk.name)
    return bool(getattr(pool, "has_metadata_snapshot"))  # noqa: B009 - of one of many kinds


def require_released(disk: Disk) -> None:
    assert not is_reserved(disk)
    assert not has_mark(disk)


thin = pytest.mark.parametrize("layout", ["thin"])


@pytest.mark.variation
@thin
def test_a_pool_s_metadata_snapshot_is_released_before_the_first_answer(disk: Disk) -> None:
    disk.write(0, b"a" * 4096)
    taken = disk.snapshot()
    with delta_of(disk).allocated(taken) as reading:
        require_released(disk)
        assert list(reading.extents()) == [Extent(0, 64 * KIB)]


@pytest.mark.variation
@thin
def test_another_program_s_metadata_snapshot_is_reported_and_left(disk: Disk) -> None:
    taken = disk.snapshot()
    disk.host.devices.reserve_metadata(disk.group, "pool-thin")
    with pytest.raises(errors.MetadataReserved, match="another program"):
        allocated_extents(disk, taken)
    assert delta_of(disk).reservations.resume() == 0
    assert is_reserved(disk)
    assert not has_mark(disk)
    disk.host.devices.release_metadata(disk.group, "pool-thin")
    assert allocated_extents(disk, taken) == []


@pytest.mark.variation
@thin
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("reserved", [True, False])
def test_the_next_start_releases_what_a_kill_left(disk: Disk, active: bool, reserved: bool) -> None:
    taken = disk.snapshot()
    mark = {"metadataSnapshot": "reserved"}
    volumes.mark(disk.host.lvm, disk.group, "pool-thin", old_tags={}, new_tags=mark)
    if reserved:
        disk.host.devices.reserve_metadata(disk.group, "pool-thin")
    if not active:
        disk.deactivate()
        disk.host.deactivate(disk.group, "pool-thin")
    in_background.resume(disk.service)
    disk.logical(disk.id)
    require_released(disk)
    assert allocated_extents(disk, taken) == []


@pytest.mark.variation
@thin
def test_a_snapshot_that_is_newer_than_what_is_reserved_is_read_by_a_reservation_of_its_own(
    disk: Disk,
) -> None:
    """What a reading left, since it could not let go, does not have it."""
    mark = {"metadataSnapshot": "reserved"}
    volumes.mark(disk.host.lvm, disk.group, "pool-thin", old_tags={}, new_tags=mark)
    disk.host.devices.reserve_metadata(disk.group, "pool-thin")
    disk.write(0, b"a" * 4096)
    assert allocated_extents(disk, disk.snapshot()) == [Extent(0, 64 * KIB)]
    require_released(disk)


# Over the socket.


Answers = list[csi.GetMetadataAllocatedResponse] | list[csi.GetMetadataDeltaResponse]


def allocated(
    client: Client, snapshot_id: str, start: int = 0, results: int = 0
) -> list[csi.GetMetadataAllocatedResponse]:
    request = csi.GetMetadataAllocatedRequest(
        snapshot_id=snapshot_id, starting_offset=start, max_results=results
    )
    return list(client.stub(SnapshotMetadataStub).GetMetadataAllocated(request))


def changed(
    client: Client, base_id: str, target_id: str, start: int = 0, results: int = 0
) -> list[csi.GetMetadataDeltaResponse]:
    request = csi.GetMetadataDeltaRequest(
        base_snapshot_id=base_id,
        target_snapshot_id=target_id,
        starting_offset=start,
        max_results=results,
    )
    return list(client.stub(SnapshotMetadataStub).GetMetadataDelta(request))


def ranges_of(answers: Answers) -> list[Extent]:
    return [Extent(b.byte_offset, b.size_bytes) for one in answers for b in one.block_metadata]


@layouts
@pytest.mark.long_on_lvm
def test_written_ranges_are_reported_without_reading_them(
    disk: Disk, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = disk.snapshot()
    disk.write(MIB, bytes(disk.held[MIB : MIB + 4096]))
    newer = disk.snapshot()
    # As it was: written all the same.
    assert ranges_of(changed(client, older, newer)) == []

    def refuse(*_: object) -> Iterable[Extent]:
        raise AssertionError("it was compared")

    # The tables of copy-on-write snapshots are read all the same.
    monkeypatch.setattr(comparing, "differing", refuse)
    [one] = streams_command.extents(client, newer, older)
    assert one.offset_bytes == MIB
    assert one.length_bytes in (4096, 64 * KIB)
    covered = streams_command.extents(client, newer)
    assert MIB // BLOCK_BYTES in blocks_of(covered, SIZE)
    assert list(streams_command.extents(client, newer, older, one.end_bytes)) == []
    with expect.code("INTERNAL", "compared"):
        changed(client, older, newer)


@pytest.mark.variation
@layouts
def test_an_answer_has_at_most_max_results_ranges(disk: Disk, client: Client) -> None:
    older = disk.snapshot()
    wanted = [Extent(number * MIB, 4096) for number in range(7)]
    for one in wanted:
        disk.write(one.offset_bytes, b"a" * 4096)
    newer = disk.snapshot()
    answers = changed(client, older, newer, results=3)
    assert [len(one.block_metadata) for one in answers] == [3, 3, 1]
    assert ranges_of(answers) == wanted
    assert {one.volume_capacity_bytes for one in answers} == {SIZE}
    assert {one.block_metadata_type for one in answers} == {csi.VARIABLE_LENGTH}
    # An interrupted stream is taken up behind its last range.
    assert ranges_of(changed(client, older, newer, wanted[3].end_bytes)) == wanted[4:]
    assert ranges_of(changed(client, older, newer, wanted[3].end_bytes - 1))[0].length_bytes == 1
    covered = blocks_of(ranges_of(allocated(client, newer, results=2)), SIZE)
    assert {one.offset_bytes // BLOCK_BYTES for one in wanted} <= covered


@pytest.mark.variation
@layouts
def test_an_answer_without_ranges_has_the_size(disk: Disk, client: Client) -> None:
    older, newer = disk.snapshot(), disk.snapshot()
    [answer] = changed(client, older, newer)
    assert (answer.volume_capacity_bytes, len(answer.block_metadata)) == (SIZE, 0)
    [empty] = allocated(client, newer, start=SIZE)
    assert (empty.volume_capacity_bytes, len(empty.block_metadata)) == (SIZE, 0)


def test_the_service_is_announced(client: Client) -> None:
    answer = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
    offered = [one.service.type for one in answer.capabilities]
    assert csi.PluginCapability.Service.SNAPSHOT_METADATA_SERVICE in offered


# The code and a part of the message; the ids of the call, one for what is allocated and two for
# what changed; its other fields.
REFUSALS: dict[str, tuple[str, str, list[str], dict[str, int]]] = {
    "no snapshot_id": ("INVALID_ARGUMENT", "snapshot_id", [""], {}),
    "no base_snapshot_id": ("INVALID_ARGUMENT", "base_snapshot_id", ["", "{new}"], {}),
    "no target_snapshot_id": ("INVALID_ARGUMENT", "target_snapshot_id", ["{old}", ""], {}),
    "max_results": ("INVALID_ARGUMENT", "max_results", ["{old}"], {"results": -1}),
    "no such snapshot": ("NOT_FOUND", "no snapshot", ["{old}x"], {}),
    "no id": ("NOT_FOUND", "no snapshot", ["snap-1"], {}),
    "a volume": ("NOT_FOUND", "no snapshot", ["{volume}"], {}),
    "no such base": ("NOT_FOUND", "no snapshot", ["{old}x", "{new}"], {}),
    "no such target": ("NOT_FOUND", "no snapshot", ["{old}", "{new}x"], {}),
    "the volume as target": ("NOT_FOUND", "no snapshot", ["{old}", "{volume}"], {}),
    "a negative offset": ("OUT_OF_RANGE", "starting_offset", ["{old}"], {"start": -1}),
    "an offset behind the end": ("OUT_OF_RANGE", str(SIZE), ["{old}"], {"start": SIZE + 1}),
    "an offset behind the end of two": (
        *("OUT_OF_RANGE", str(SIZE)),
        ["{old}", "{new}"],
        {"start": SIZE + 1},
    ),
    "the base is newer": ("INVALID_ARGUMENT", "taken later", ["{new}", "{old}"], {}),
    "of another group": ("FAILED_PRECONDITION", "not on this node", ["x{old}"], {}),
}


@pytest.mark.variation
@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize("layout", ["linear"])
def test_bad_requests_are_refused(disk: Disk, client: Client, why: str) -> None:
    old, new = disk.snapshot(), disk.snapshot()
    code, word, names, more = REFUSALS[why]
    found = [one.format(old=old, new=new, volume=disk.id) for one in names]
    start, results = more.get("start", 0), more.get("results", 0)
    with expect.code(code, word):
        if len(found) == 1:
            allocated(client, found[0], start, results)
        else:
            changed(client, found[0], found[1], start, results)


def overflow(disk: Disk) -> None:
    """Write more than a small snapshot has room for."""
    for at in range(0, 8 * MIB, 64 * KIB):
        disk.write(at, b"b" * 64 * KIB)


@pytest.mark.variation
@pytest.mark.parametrize("layout", ["linear"])
def test_an_overflowed_snapshot_is_reported_as_lost(disk: Disk, client: Client) -> None:
    taken = client.snapshot("small", disk.id, {"size": "4Mi"}).snapshot_id
    newer = client.snapshot("large", disk.id).snapshot_id
    overflow(disk)
    for ask in (lambda: allocated(client, taken), lambda: changed(client, taken, newer)):
        with expect.code("FAILED_PRECONDITION", "lost"):
            ask()


@pytest.mark.variation
@pytest.mark.parametrize("layout", ["linear"])
def test_a_snapshot_that_overflows_while_it_is_read_is_reported_as_lost(
    disk: Disk, client: Client
) -> None:
    disk.write(0, b"a" * MIB)
    taken = client.snapshot("small", disk.id, {"size": "4Mi"}).snapshot_id
    with delta_of(disk).allocated(taken) as reading:
        extents = reading.extents()
        overflow(disk)
        with pytest.raises(errors.SourceLost):
            list(extents)


@pytest.mark.variation
@layouts
def test_a_cancelled_stream_closes_its_devices(disk: Disk, client: Client) -> None:
    older = disk.snapshot()
    for number in range(200):
        disk.write(number * 64 * KIB, b"a" * 4096)
    newer = disk.snapshot()
    request = csi.GetMetadataDeltaRequest(
        base_snapshot_id=older, target_snapshot_id=newer, max_results=1
    )
    stream = client.stub(SnapshotMetadataStub).GetMetadataDelta(request)
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
    if layout != "thin":
        assert started(disk) == [look]
        changed(client, older, newer)
        assert started(disk) == []
        return
    # A tag, and it is active; what the tag changed is looked at, as is what the pool's changed.
    activate, deactivate = [mark, mark], [look, mark, mark]
    read = [look, mark, "thin_dump", mark]
    assert started(disk) == [look, *activate, *read, *deactivate]
    changed(client, older, newer)
    read = [look, mark, "thin_delta", mark]
    assert started(disk) == [look, *activate, *activate, *read, *deactivate]


@pytest.mark.variation
@thin
def test_a_failed_program_is_reported_and_nothing_stays_reserved(
    disk: Disk, host: AnyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = disk.snapshot()
    # A number that no volume of the pool has.
    monkeypatch.setattr(type(host.devices), "thin_id", lambda *_: 99)
    with pytest.raises(mount_errors.BadReport, match="do not have the volume"):
        allocated_extents(disk, taken)
    require_released(disk)


@pytest.mark.variation
def test_streams_end_when_the_service_does(client: Client, service: Service, host: AnyHost) -> None:
    disk = Disk(client, service, host, "linear")
    taken = disk.snapshot()
    with changed_blocks.of(service).delta.allocated(taken) as reading:
        changed_blocks.of(service).delta.stop()
        with pytest.raises(errors.OperationPending):
            list(reading.extents())
