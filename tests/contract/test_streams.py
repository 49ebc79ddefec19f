"""Snapshots sent and volumes received between two services with groups of their own."""

import io
import random
from dataclasses import replace

import chosen
import expect
import histories
import nodes
import pytest
from clocks import Clock
from google.protobuf.message import Message
from nodes import LAYOUTS, MIB, SIZE, Node, volume_of, write
from real.any import logical

from agent.core import errors, ids, tag
from agent.csi.client import block, mounted
from agent.extras.changed_blocks.extents import BLOCK_BYTES
from agent.extras.transfer import streams_command
from agent.requests.parameters import MUTABLE
from mount import luks
from mount import mount_errors as mount_errors
from proto import csi_pb2 as csi

# A snapshot's, for all that changes here after it.
ROOM = {"size": str(SIZE)}


def take(here: Node, seed: int | None = None, pieces: int = 8) -> csi.Volume:
    """Take snapshot 1 of a new volume, which has content where there is a seed."""
    volume = volume_of(here)
    if seed is not None:
        write(here, "vol-db", random.Random(seed), pieces)
    here.client.snapshot("1", volume.volume_id)
    return volume


def receive_first(here: Node, there: Node) -> None:
    nodes.receive(there, "copy", nodes.stream(here, "1"))


def require_same(here: Node, snapshot: str, there: Node, name: str) -> None:
    """Both have the same checksum."""
    found = streams_command.received_checksum(there.at, name)
    assert found == streams_command.checksum_of(here.at, snapshot)


def user_device(node: Node, name: str) -> str:
    """The device that a volume's user has: of an encrypted one, its mapping."""
    below = node.host.devices.find(node.group, name)
    assert below is not None
    return (node.host.devices.mapping(below) or below).path


def finished(there: Node) -> csi.Volume:
    """Finish what was received, and return the volume."""
    streams_command.finish(there.at, "copy")
    [copy] = there.client.volumes()
    return copy


@pytest.mark.parametrize(
    "kinds",
    chosen.kinds(
        [f"{one}, {other}" for one in LAYOUTS for other in LAYOUTS],
        usual=[],
        fast=["linear, thin", "thin, raid1", "raid1, striped", "striped, linear"],
    ),
)
def test_one_full_stream_and_five_increments_are_equal_to_the_byte(
    here: Node, there: Node, kinds: str
) -> None:
    one, other = kinds.split(", ")
    chance = random.Random(17)
    volume = volume_of(here, one)
    chain = b""
    for number in range(6):
        write(here, "vol-db", chance)
        if number == 3:
            here.client.expand(volume.volume_id, SIZE + 8 * MIB)
        here.client.snapshot(str(number), volume.volume_id)
        since = str(number - 1) if number else ""
        chain += nodes.stream(here, str(number), since=since, compress=number % 2 == 0)
    state = nodes.receive(there, "copy", chain, other)
    assert state["state"] == tag.RECEIVING
    size = SIZE + 8 * MIB
    assert there.content("vol-copy", size) == here.content("vol-db", size)
    require_same(here, "5", there, "copy")
    assert streams_command.finish(there.at, "copy")["state"] == tag.READY
    [volume] = there.client.volumes()
    assert volume.volume_context["carver/class"] == other


@pytest.mark.parametrize(
    "layout",
    chosen.kinds(
        [*LAYOUTS, *(f"{histories.SEALED}{one}" for one in LAYOUTS)],
        usual=(),
        fast=["raid1", "sealed-linear", "sealed-striped", "thin"],
    ),
)
@pytest.mark.timeout(7200)
def test_random_histories_are_sent_to_the_byte(
    here: Node, there: Node, layout: str, clock: Clock, real: bool, request: pytest.FixtureRequest
) -> None:
    every = real and request.config.getoption("--every")
    asked = chosen.numbers("CARVER_STREAMS", seed=1, histories=5 if every else 1)
    for number in range(asked["histories"]):
        chance = random.Random(f"{asked['seed']} {layout} {number}")
        disk = histories.Disk(here.client, here.service, here.host, layout, "db")
        histories.live(disk, clock, chance)
        since = ""
        for one in disk.snapshots:
            name = ids.readable_name(one)
            compare = bool(since) and chance.random() < 0.5
            stream = nodes.stream(here, name, since=since, compare=compare)
            nodes.receive(there, "copy", stream, chance.choice(list(LAYOUTS)) if not since else "")
            require_same(here, name, there, "copy")
            since = name
        held = disk.holds(one)
        copy = finished(there)
        assert copy.capacity_bytes >= len(held)
        place = there.directory / "staging"
        there.client.stage(copy, place, block(), histories.KEY if disk.is_sealed else {})
        found = there.host.read_bytes(user_device(there, "vol-copy"), 0, len(held))
        # Its unwritten ends are blank.
        inside = disk.has_written(one) if disk.is_sealed else set(range(len(held) // BLOCK_BYTES))
        assert not histories.unlike(found, held) & inside
        there.client.unstage(copy.volume_id, place)
        there.client.delete(copy.volume_id)
        disk.end()


@pytest.mark.variation
def test_a_received_file_system_is_checked_and_used(here: Node, there: Node) -> None:
    limit = {"writeIOPS": "300", "readBandwidthPerGiB": "1MiB"}
    volume = here.client.create("db", 64 * MIB, mounted("ext4"), mutable=limit)
    here.client.stage(volume, here.directory / "staging", mounted("ext4"))
    here.client.snapshot("1", volume.volume_id)
    receive_first(here, there)
    # It is no volume before it is finished.
    assert list(there.client.volumes()) == []
    there.host.commands.clear()
    streams_command.finish(there.at, "copy")
    assert "fsck.ext4" in {words[0] for words in there.host.commands}
    [copy] = there.client.volumes()
    assert copy.volume_id != volume.volume_id
    has = logical(there.host, there.group, "vol-copy").tuning
    assert (has.write_iops, has.read_bandwidth_per_gib) == (300, MIB)
    assert copy.volume_context == volume.volume_context
    here.client.unstage(volume.volume_id, here.directory / "staging")
    place = there.directory / "staging"
    there.client.stage(copy, place, mounted("ext4"))
    assert there.client.stats(copy.volume_id, place).usage[0].total > 50 * MIB
    there.client.unstage(copy.volume_id, place)
    # The second time nothing is done.
    streams_command.finish(there.at, "copy")
    there.client.delete(copy.volume_id)
    assert there.names() == set()


Rows = dict[str, tuple[str, str, object]]
# Mutable parameters, each with the field of Tuning and its value, as the first stream finds them;
# and as a later one does.
FIRST: Rows = {
    "readAhead": ("1MiB", "read_ahead_bytes", MIB),
    "readIOPS": ("500", "read_iops", 500),
    "writeBandwidth": ("1MiB/s", "write_bandwidth", MIB),
}
LATER: Rows = {
    "readAhead": ("auto", "read_ahead_bytes", "auto"),
    "readIOPS": ("0", "read_iops", 0),
    "writeBandwidth": ("2MiB/s", "write_bandwidth", 2 * MIB),
    "writeIOPSPerGiB": ("20", "write_iops_per_gib", 20),
}
FIRST_OF_RAID: Rows = {"minimumRecoveryRate": ("1MiB", "minimum_recovery_kib", 1024)}
LATER_OF_RAID: Rows = {
    "minimumRecoveryRate": ("0", "minimum_recovery_kib", 0),
    "maximumRecoveryRate": ("8MiB", "maximum_recovery_kib", 8192),
}


@pytest.mark.variation
@pytest.mark.parametrize("kinds", ["thin, raid1", "raid1, raid1", "raid1, thin", "linear, linear"])
def test_mutable_parameters_follow_a_volume_as_they_were_last(
    here: Node, there: Node, kinds: str
) -> None:
    """Rates of RAID recovery only where both are RAIDs: other layouts have none."""
    layout, other = kinds.split(", ")
    volume = volume_of(here, layout)
    rounds = ((FIRST, FIRST_OF_RAID), (LATER, LATER_OF_RAID))
    name, since = "", ""
    for number, (every, of_raid) in enumerate(rounds):
        wanted = every | (of_raid if layout == "raid1" else {})
        if number and layout != "thin":
            # lvm2 changes the read-ahead of no volume that has copy-on-write snapshots.
            wanted = {key: row for key, row in wanted.items() if key != "readAhead"}
        here.client.modify(volume.volume_id, {key: text for key, (text, *_) in wanted.items()})
        name = str(number)
        here.client.snapshot(name, volume.volume_id, ROOM if layout != "thin" else None)
        nodes.receive(there, "copy", nodes.stream(here, name, since=since), "" if since else other)
        since = name
        found = vars(logical(there.host, there.group, "vol-copy").tuning)
        for key, (_, part, value) in wanted.items():
            is_carried = key not in of_raid or other == "raid1"
            assert found[part] == (value if is_carried else 0), key
    finished(there)
    here.client.unstage(volume.volume_id, here.directory / "staging")


@pytest.mark.variation
def test_no_fact_says_that_there_is_no_limit(here: Node) -> None:
    """Versions up to 0.2.0 would keep a tag for it, and then a second one beside it."""
    take(here)
    with streams_command.outgoing(here.at, here.client.snapshots()[0].snapshot_id) as source:
        assert not set(source.header.facts) & {row.key for row in MUTABLE}


@pytest.mark.variation
def test_a_file_system_that_is_made_between_two_streams_is_known(here: Node, there: Node) -> None:
    volume = here.client.create("db", 64 * MIB, mounted("ext4"))
    here.client.snapshot("1", volume.volume_id, ROOM)
    receive_first(here, there)
    assert not logical(there.host, there.group, "vol-copy").own_tags.get(tag.FORMATTED)
    here.client.stage(volume, here.directory / "staging", mounted("ext4"))
    here.client.unstage(volume.volume_id, here.directory / "staging")
    here.client.snapshot("2", volume.volume_id, ROOM)
    nodes.receive(there, "copy", nodes.stream(here, "2", since="1"))
    assert logical(there.host, there.group, "vol-copy").own_tags[tag.FORMATTED] == "ext4"
    finished(there)


@pytest.mark.variation
def test_a_volume_being_received_is_no_volume_and_is_removed_on_confirmation(
    here: Node, there: Node
) -> None:
    volume = take(here)
    receive_first(here, there)
    identity = streams_command.status(there.at, "copy")["volume_id"]
    pretended = type(volume)(volume_id=identity)
    place = there.directory / "staging"
    for again in range(2):
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.stage(pretended, place, block())
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.publish(pretended, place, there.directory / "raw", block())
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.delete(identity)
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.expand(identity, 2 * SIZE)
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.snapshot("s", identity)
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.create("copy", SIZE, block())
        if not again:
            there.restart()
    with pytest.raises(errors.NotConfirmed, match="is not removed"):
        streams_command.abort(there.at, "copy", confirmed=False)
    assert there.names() == {"vol-copy"}
    streams_command.abort(there.at, "copy", confirmed=True)
    assert there.names() == set()
    # There is nothing to ask about any more.
    for confirmed in (True, False):
        streams_command.abort(there.at, "copy", confirmed=confirmed)


@pytest.mark.variation
def test_a_stream_that_was_cut_off_is_continued(
    here: Node, there: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.extras.streams.reading.RECORD_SECONDS", 0.0)
    take(here, 3, 40)
    whole = nodes.stream(here, "1")
    with pytest.raises(errors.StreamEnded, match="--status"):
        nodes.receive(there, "copy", whole[: len(whole) // 2])
    state = streams_command.status(there.at, "copy")
    assert 0 < state["offset_bytes"] < SIZE
    assert not state["chain"]
    with expect.code("FAILED_PRECONDITION", "incomplete"):
        streams_command.finish(there.at, "copy")
    there.restart()
    # What begins behind that would leave a gap.
    late = nodes.stream(here, "1", offset_bytes=state["offset_bytes"] + 4096)
    with expect.code("FAILED_PRECONDITION", "begins at byte"):
        nodes.receive(there, "copy", late)
    rest = nodes.stream(here, "1", offset_bytes=state["offset_bytes"])
    assert len(rest) < len(whole)
    nodes.receive(there, "copy", rest)
    assert there.content("vol-copy") == here.content("snap-1")
    # Sent once more, it is there already.
    assert nodes.receive(there, "copy", whole)["chain"] == state["into"]


@pytest.mark.variation
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compared_increment_is_smaller_and_equivalent(
    here: Node, there: Node, layout: str
) -> None:
    chance = random.Random(18)
    volume = volume_of(here, layout)
    write(here, "vol-db", chance, 20)
    before = here.content("vol-db")
    here.client.snapshot("1", volume.volume_id, ROOM)
    # Some once more as it was, and some anew.
    path = here.device("vol-db")
    here.host.write_bytes(path, 4 * MIB, before[4 * MIB : 6 * MIB])
    here.host.write_bytes(path, 9 * MIB, chance.randbytes(4096) + before[9 * MIB + 4096 : 10 * MIB])
    here.client.snapshot("2", volume.volume_id, ROOM)
    compared = nodes.stream(here, "2", since="1", compare=True)
    written = nodes.stream(here, "2", since="1")
    assert 4096 < len(compared) < 8192
    assert len(compared) < len(written)
    whole = nodes.stream(here, "1")
    for name, stream in (("one", compared), ("other", written)):
        nodes.receive(there, name, whole + stream, layout)
        assert there.content(f"vol-{name}") == here.content("snap-2")
    with pytest.raises(errors.BadField, match="--since"):
        nodes.stream(here, "2", compare=True)


@pytest.mark.variation
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_increment_is_continued_either_way_despite_new_writes(
    here: Node, there: Node, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.extras.streams.reading.RECORD_SECONDS", 0.0)
    chance = random.Random(19)
    volume = volume_of(here, layout)
    write(here, "vol-db", chance)
    here.client.snapshot("1", volume.volume_id, ROOM)
    nodes.receive(there, "copy", nodes.stream(here, "1"), layout)
    write(here, "vol-db", chance, 40)
    here.client.snapshot("2", volume.volume_id, ROOM)
    reached = 0
    for number in range(3):
        how = {"since": "1", "offset_bytes": reached, "compare": number == 1}
        stream = nodes.stream(here, "2", **how)
        with pytest.raises(errors.StreamEnded):
            nodes.receive(there, "copy", stream[: len(stream) // 2], layout)
        offset = int(str(streams_command.status(there.at, "copy")["offset_bytes"]))
        assert offset > reached
        reached = offset
        # What the older snapshot has copies of is more from now on.
        write(here, "vol-db", chance, 10)
    rest = nodes.stream(here, "2", since="1", offset_bytes=reached)
    nodes.receive(there, "copy", rest, layout)
    assert there.content("vol-copy") == here.content("snap-2")


@pytest.mark.variation
def test_an_altered_stream_is_not_finished(here: Node, there: Node) -> None:
    take(here, 4)
    altered = bytearray(nodes.stream(here, "1"))
    altered[-5000] ^= 1
    with pytest.raises(errors.BadStream, match="altered"):
        nodes.receive(there, "copy", bytes(altered))
    with expect.code("FAILED_PRECONDITION", "incomplete"):
        streams_command.finish(there.at, "copy")
    streams_command.abort(there.at, "copy", confirmed=True)


@pytest.mark.variation
def test_a_stream_continues_exactly_its_base_or_is_refused(here: Node, there: Node) -> None:
    chance = random.Random(5)
    volume = volume_of(here)
    for number in range(3):
        write(here, "vol-db", chance)
        here.client.snapshot(str(number), volume.volume_id)
    first, second = nodes.stream(here, "0"), nodes.stream(here, "1", since="0")
    third = nodes.stream(here, "2", since="1")
    with expect.code("FAILED_PRECONDITION", "needs a base"):
        nodes.receive(there, "copy", second)
    assert there.names() == set()
    nodes.receive(there, "copy", first)
    before = there.content("vol-copy")
    with expect.code("FAILED_PRECONDITION", "continues"):
        nodes.receive(there, "copy", third)
    assert there.content("vol-copy") == before
    nodes.receive(there, "copy", second + third)
    # The past does not come back.
    with expect.code("FAILED_PRECONDITION", "continues"):
        nodes.receive(there, "copy", first)
    assert there.content("vol-copy") == here.content("snap-2")
    streams_command.finish(there.at, "copy")
    with expect.code("ALREADY_EXISTS", "not being received"):
        nodes.receive(there, "copy", second)


@pytest.mark.variation
def test_only_an_older_snapshot_of_the_same_volume_is_a_base(here: Node) -> None:
    one, other = volume_of(here), here.client.create("web", SIZE, block())
    for name, of in (("a", one), ("b", one), ("c", other)):
        here.client.snapshot(name, of.volume_id)
    with expect.code("INVALID_ARGUMENT", "no older"):
        nodes.stream(here, "a", since="b")
    with expect.code("INVALID_ARGUMENT", "another volume"):
        nodes.stream(here, "c", since="a")
    with pytest.raises(errors.NoSuchSnapshot):
        nodes.stream(here, "a", since="d")
    with pytest.raises(errors.BadField, match="offset"):
        nodes.stream(here, "a", offset_bytes=100)


@pytest.mark.variation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hours", [-2, 2])
def test_a_step_of_the_clock_changes_no_stream(
    here: Node, there: Node, clock: Clock, layout: str, hours: int
) -> None:
    chance = random.Random(20)
    volume = volume_of(here, layout)
    write(here, "vol-db", chance)
    here.client.snapshot("1", volume.volume_id, ROOM)
    clock.step(hours * 3600)
    write(here, "vol-db", chance)
    here.client.snapshot("2", volume.volume_id, ROOM)
    write(here, "vol-db", chance)
    for compare in (False, True):
        chain = nodes.stream(here, "1") + nodes.stream(here, "2", since="1", compare=compare)
        nodes.receive(there, f"copy-{compare}", chain, layout)
        assert there.content(f"vol-copy-{compare}") == here.content("snap-2")
    with expect.code("INVALID_ARGUMENT", "no older"):
        nodes.stream(here, "1", since="2")


@pytest.mark.variation
@pytest.mark.parametrize("which", ["snapshot", "base"])
def test_a_snapshot_replaced_by_one_of_its_name_is_not_sent(
    here: Node, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of the command's calls; so it is for those that 0.1.0 took."""
    disk = histories.Disk(here.client, here.service, here.host, "linear", "db")
    for number in range(2):
        disk.write(number * MIB, b"a" * 4096)
        disk.forget_order(disk.snapshot())
    base, target = disk.snapshots
    disk.write(4 * MIB, b"b" * 4096)
    name = "OpenSnapshot" if which == "snapshot" else "GetWritten"
    ask, taken = getattr(here.transfer, name), [target if which == "snapshot" else base]

    def meet(request: Message) -> object:
        found = ask(request) if which == "snapshot" else None
        if taken:
            gone = taken.pop()
            here.client.delete_snapshot(gone)
            here.client.snapshot(ids.logical_name(gone).removeprefix("snap-"), disk.id, ROOM)
        return found or ask(request)

    monkeypatch.setattr(here.transfer, name, meet)
    with pytest.raises(errors.SourceLost, match="taken anew"):
        nodes.stream(here, "s-1", since="s-0")


@pytest.mark.variation
def test_a_group_that_is_too_small_is_refused(here: Node, there: Node) -> None:
    taken = there.client.capacity().available_capacity - SIZE // 2
    there.client.create("other", taken, block())
    take(here)
    with expect.code("RESOURCE_EXHAUSTED", "room"):
        receive_first(here, there)
    assert there.names() == {"vol-other"}


@pytest.mark.variation
def test_an_open_volume_takes_no_stream(here: Node, there: Node) -> None:
    volume = take(here)
    whole = nodes.stream(here, "1")
    nodes.receive(there, "copy", whole)
    write(here, "vol-db", random.Random(6))
    here.client.snapshot("2", volume.volume_id)
    later = nodes.stream(here, "2", since="1")
    with there.host.kernel.opened(there.device("vol-copy"), to_write=True):
        with expect.code("FAILED_PRECONDITION", "in use"):
            nodes.receive(there, "copy", later)
        with expect.code("FAILED_PRECONDITION", "in use"):
            streams_command.finish(there.at, "copy")
        with expect.code("FAILED_PRECONDITION", "in use"):
            streams_command.abort(there.at, "copy", confirmed=True)
    nodes.receive(there, "copy", later)
    streams_command.abort(there.at, "copy", confirmed=True)


@pytest.mark.variation
def test_a_snapshot_is_not_deleted_while_it_is_sent(here: Node) -> None:
    volume = volume_of(here)
    snapshot = here.client.snapshot("1", volume.volume_id)
    with (
        streams_command.outgoing(here.at, snapshot.snapshot_id),
        expect.code("FAILED_PRECONDITION"),
    ):
        here.client.delete_snapshot(snapshot.snapshot_id)
    here.client.delete_snapshot(snapshot.snapshot_id)


@pytest.mark.variation
def test_a_stream_is_not_for_a_terminal(here: Node) -> None:
    take(here)

    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    with pytest.raises(errors.TransferFailed, match="terminal"):
        streams_command.send(here.at, "1", Terminal())
    with pytest.raises(errors.TransferFailed, match="terminal"):
        streams_command.receive(here.at, "copy", Terminal())
    assert here.names() == {"vol-db", "snap-1"}


@pytest.mark.variation
@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"access": "tape"}, "access"),
        ({"fsType": "ntfs"}, "fsType"),
        ({"formatted": "ntfs"}, "formatted"),
        ({"mountOptions": "suid_dumpable"}, "mountOptions"),
        ({"fsType": "ext4", "mkfsOptions": "-E root_owner=1"}, "mkfsOptions"),
        ({"capabilities": "x" * 2000}, "capabilities"),
        ({"readIOPS": "1"}, "readIOPS"),
        ({"readAhead": "soon"}, "readAhead"),
        ({"minimumRecoveryRate": "2MiB", "maximumRecoveryRate": "1MiB"}, "minimum recovery rate"),
    ],
)
def test_the_facts_of_a_stream_are_checked(
    here: Node, there: Node, facts: dict[str, str], field: str
) -> None:
    volume = volume_of(here)
    snapshot = here.client.snapshot("1", volume.volume_id)
    out = io.BytesIO()
    with streams_command.outgoing(here.at, snapshot.snapshot_id) as source:
        header = replace(source.header, facts={**source.header.facts, **facts})
        replace(source, header=header).send(out.write)
    with expect.code("INVALID_ARGUMENT", field):
        nodes.receive(there, "copy", out.getvalue())
    assert there.names() == set()


KEY = {"passphrase": "correct horse battery staple"}
SEALED = {"carver/encryption": "luks2"}


@pytest.mark.variation
@pytest.mark.parametrize("fs_type", ["ext4", "btrfs", "block"])
def test_a_received_encrypted_volume_is_opened_by_its_key(
    here: Node, there: Node, fs_type: str
) -> None:
    how = block() if fs_type == "block" else mounted(fs_type)
    place = here.directory / "staging"
    volume = here.client.create("db", 256 * MIB, how, parameters=SEALED)
    here.client.stage(volume, place, how, KEY)
    here.client.unstage(volume.volume_id, place)
    here.client.snapshot("1", volume.volume_id)
    receive_first(here, there)
    copy = finished(there)
    assert copy.capacity_bytes == volume.capacity_bytes
    assert copy.volume_context == volume.volume_context
    place = there.directory / "staging"
    with expect.code("INVALID_ARGUMENT", "is encrypted"):
        there.client.stage(copy, place, how)
    with expect.code("UNAUTHENTICATED"):
        there.client.stage(copy, place, how, {"passphrase": "Tr0ub4dor&3"})
    for _ in range(2):
        there.client.stage(copy, place, how, KEY)
        there.client.unstage(copy.volume_id, place)
    there.client.expand(copy.volume_id, 300 * MIB)
    there.client.delete(copy.volume_id)
    assert there.names() == set()


@pytest.mark.variation
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_increment_of_an_encrypted_volume_has_its_header(
    here: Node, there: Node, layout: str
) -> None:
    """A stream is of the logical volume, whatever the offsets that CSI tells of."""
    place, chance = here.directory / "staging", random.Random(21)
    parameters = {**SEALED, "class": layout}
    volume = here.client.create("db", SIZE, block(), parameters=parameters)
    keys = [KEY, {"passphrase": "Tr0ub4dor&3", "previousPassphrase": KEY["passphrase"]}]
    for number, key in enumerate(keys):
        here.client.stage(volume, place, block(), key)
        device = user_device(here, "vol-db")
        for _ in range(8):
            offset = 4096 * chance.randrange(volume.capacity_bytes // 4096)
            here.host.write_bytes(device, offset, chance.randbytes(4096))
        here.client.unstage(volume.volume_id, place)
        here.client.snapshot(str(number), volume.volume_id, ROOM)
    size = here.host.kernel.device_size_bytes(here.device("vol-db"))
    whole = nodes.stream(here, "0")
    for compare in (False, True):
        name = f"copy-{compare}"
        nodes.receive(
            there, name, whole + nodes.stream(here, "1", since="0", compare=compare), layout
        )
        assert there.content(f"vol-{name}", size) == here.content("snap-1", size)
        require_same(here, "1", there, name)
    streams_command.finish(there.at, name)
    [copy] = there.client.volumes()
    there.client.stage(copy, there.directory / "staging", block(), {"passphrase": "Tr0ub4dor&3"})
    there.client.unstage(copy.volume_id, there.directory / "staging")


@pytest.mark.variation
@pytest.mark.parametrize("sent_first", [False, True], ids=["whole", "an increment"])
def test_what_is_sent_while_the_key_changes_loses_the_old_key_when_it_is_staged(
    here: Node, there: Node, monkeypatch: pytest.MonkeyPatch, sent_first: bool
) -> None:
    place, new = here.directory / "staging", {"passphrase": "Tr0ub4dor&3"}
    volume = here.client.create("db", SIZE, block(), parameters=SEALED)
    here.client.stage(volume, place, block(), KEY)
    if sent_first:
        here.client.snapshot("0", volume.volume_id, ROOM)

    def fails(_self: luks.Cryptsetup, path: str, *_key: object) -> None:
        raise mount_errors.CryptFailed("luksKillSlot", path, "Device or resource busy")

    both = {**new, "previousPassphrase": KEY["passphrase"]}
    with monkeypatch.context() as patch:
        patch.setattr(luks.Cryptsetup, "remove_key", fails)
        here.client.publish(volume, place, here.directory / "target", block(), both)
    here.client.snapshot("1", volume.volume_id, ROOM)
    # What the volume has by the time that the snapshot is sent says nothing of the snapshot.
    here.client.publish(volume, place, here.directory / "target", block(), both)
    assert here.client.volumes_here().keys[volume.volume_id] == "(unnamed)"
    stream = nodes.stream(here, "1", since="0" if sent_first else None)
    if sent_first:
        stream = nodes.stream(here, "0") + stream
    nodes.receive(there, "copy", stream)
    copy, place = finished(there), there.directory / "staging"
    there.client.stage(copy, place, block(), new)
    there.client.unstage(copy.volume_id, place)
    with expect.code("UNAUTHENTICATED"):
        there.client.stage(copy, place, block(), KEY)


@pytest.mark.variation
def test_a_received_unused_encrypted_volume_gets_a_header(here: Node, there: Node) -> None:
    volume = here.client.create("db", SIZE, block(), parameters=SEALED)
    here.client.snapshot("1", volume.volume_id)
    # What is made since is not in the snapshot.
    here.client.stage(volume, here.directory / "staging", block(), KEY)
    here.client.unstage(volume.volume_id, here.directory / "staging")
    receive_first(here, there)
    copy = finished(there)
    there.client.stage(copy, there.directory / "staging", block(), {"passphrase": "another"})
    there.client.unstage(copy.volume_id, there.directory / "staging")
