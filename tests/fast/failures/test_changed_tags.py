"""Tags that were lost, doubled or made odd by hand: nothing is completed or erased by that."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import configured
import expect
import grpc
import in_background
import pytest
import serving
from csi_client import Client
from fakes.host import FakeHost
from real.any import device

from agent.core import tag
from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.operations import preflight
from agent.settings.settings import Config
from agent.volumes import allocation, records
from lvm import report, tags
from mount.command import Result

MIB = 1 << 20
SIZE = 32 * MIB
TENANT = b"an earlier tenant"
DATA = b"the data".ljust(4096, b".")
STATES = (tag.READY, tag.COPYING, tag.WIPING, tag.RECEIVING, tag.MOVED)
pytestmark = pytest.mark.settings(
    classes=(configured.PLAIN, replace(configured.FULL, name="zeroed"), configured.THIN),
    wipe="none",
)


def own_tags(fake: FakeHost, name: str) -> set[str]:
    found: set[str] = fake.lvm2.groups["data"].volumes[name].tags
    return found


def restarted(config: Config, fake: FakeHost) -> Service:
    return serving.start(config, fake)


def half_copied(client: Client, service: Service, fake: FakeHost, of: str) -> None:
    """A volume `copy` that an ended process was filling."""
    service.copier.grace_seconds = 0.01
    fake.mark_free("data", TENANT)
    source = client.create("source", SIZE, block())
    fake.write_bytes(device(fake, "data", "vol-source"), 0, DATA)
    if of == "nothing":
        content, device_class = None, "zeroed"
    else:
        content, device_class = of_volume(source.volume_id), "plain"
    if of == "snapshot":
        content = of_snapshot(client.snapshot("s", source.volume_id).snapshot_id)
    with expect.code("ABORTED"):
        client.create("copy", SIZE, block(), parameters={"class": device_class}, source=content)


@pytest.mark.parametrize(
    ("of", "lost"), [("volume", "from"), ("snapshot", "from"), ("nothing", "zero")]
)
def test_a_copy_that_lost_what_it_is_made_of_is_not_completed(
    client: Client,
    service: Service,
    fake: FakeHost,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    of: str,
    lost: str,
) -> None:
    def fails(*_words: object, **_more: object) -> None:
        raise OSError(5, "killed")

    with monkeypatch.context() as failing:
        failing.setattr(fake.kernel, "copy", fails)
        failing.setattr(fake.kernel, "zero_out", fails)
        half_copied(client, service, fake, of)
        service.stop()
    own = own_tags(fake, "vol-copy")
    [gone] = [one for one in own if one.startswith(f"carver.{lost}=")]
    own.remove(gone)
    before = set(fake.lvm2.groups["data"].volumes)
    again = restarted(config, fake)
    with Client(config.endpoint) as caller:
        assert "carver.state=copying" in own
        assert [one.volume_id for one in caller.volumes()][1:] == []
        with expect.code("FAILED_PRECONDITION", "`copying` without `from`", "lvs -o +tags"):
            caller.delete(f"{group_id(fake)}/vol-copy")
    again.stop()
    assert set(fake.lvm2.groups["data"].volumes) == before
    # Put right, it is completed.
    own.add(gone)
    again = restarted(config, fake)
    expect.soon(lambda: "carver.state=ready" in own_tags(fake, "vol-copy"))
    contents = fake.read_bytes(device(fake, "data", "vol-copy"), 0, SIZE)
    assert contents.startswith(bytes(4096) if of == "nothing" else DATA)
    assert of != "nothing" or TENANT not in contents
    again.stop()


def group_id(fake: FakeHost) -> str:
    [one] = report.read(fake.lvm).groups.values()
    return f"data@{one.uuid.replace('-', '')[:8]}"


@pytest.mark.parametrize("pair", list(itertools.combinations(STATES, 2)), ids="+".join)
def test_a_volume_with_two_states_is_neither_used_nor_erased(
    client: Client, service: Service, fake: FakeHost, config: Config, pair: tuple[str, str]
) -> None:
    made = client.create("1", SIZE, block())
    own = own_tags(fake, "vol-1")
    own -= {"carver.state=ready"}
    own |= {f"carver.state={one}" for one in pair}
    service.stop()
    again = restarted(config, fake)
    calls: list[Callable[[Client], object]] = [
        lambda caller: caller.delete(made.volume_id),
        lambda caller: caller.create("1", SIZE, block()),
        lambda caller: caller.expand(made.volume_id, 2 * SIZE),
        lambda caller: caller.snapshot("s", made.volume_id),
    ]
    with Client(config.endpoint) as caller:
        for call in calls:
            with expect.code("FAILED_PRECONDITION", "`state` twice"):
                call(caller)
        caller.create("2", SIZE, block())
    again.stop()
    assert "vol-1" in fake.lvm2.groups["data"].volumes
    found = preflight._damaged(report.read(fake.lvm).group("data"))
    assert [verdict for verdict, *_ in found] == [preflight.WARN]


def test_which_of_two_values_counts_is_the_same_in_each_process() -> None:
    values = [f"carver.class={one}" for one in ("b", "a", "c")]
    found = {tags.decode(order)["class"] for order in itertools.permutations(values)}
    assert found == {"a"}
    assert tags.ambiguous_keys(values) == {"class"}
    assert tags.ambiguous_keys(values[:1]) == frozenset()


def test_all_needs_count_where_there_are_several_tags(fake: FakeHost, client: Client) -> None:
    client.create("1", SIZE, block())
    own_tags(fake, "vol-1").update({"carver.needs=moonlight", "carver.needs=starlight"})
    logical = report.read(fake.lvm).group("data").volume("vol-1")
    assert records.unknown_needs(logical) == {"moonlight", "starlight"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((str(one), one) for one in (0, 1, 7, (1 << 63) - 1)),
        *((one, None) for one in ("", "-1", "+1", " 1", "1 ", "1_0", "\u00b2", "\u0663", "0x1")),
        *((one, None) for one in (str(1 << 63), "9" * 25, "9" * 900, "1\n")),
    ],
)
def test_a_number_in_a_tag_is_one_of_63_bits(text: str, number: int | None) -> None:
    assert tags.number(text) == number


NUMBERS = (
    *(tag.SIZE, tag.REQUESTED, tag.HEADER, tag.WANTED, tag.REFUSED, tag.TIME, tag.SEQUENCE),
    *(tag.MEMBERS, tag.CONTENT, tag.OFFSET, tag.CHUNK, tag.LAYOUT, "readIOPS", "ownRecoveryRate"),
)
ODD = ("9" * 25, "9" * 400, str((1 << 63) - 1), "\u00b2", "0", "-1", "7", "", "raid1:1:99")


@pytest.mark.parametrize("key", NUMBERS)
def test_an_odd_number_in_a_tag_breaks_no_call_about_others(
    client: Client, fake: FakeHost, key: str
) -> None:
    one = client.create("1", SIZE, block())
    client.create("t", SIZE, block(), parameters={"class": "thin"})
    client.snapshot("1", one.volume_id)
    for name, value in itertools.product(("vol-1", "snap-1", "pool-thin", "vol-t"), ODD):
        own = own_tags(fake, name)
        before = set(own)
        own -= {each for each in before if each.startswith(f"carver.{key}=")}
        own.add(tags.format_one(key, value))
        try:
            client.volumes()
            client.snapshots()
            client.capacity()
            client.storage_health()
            client.unhealthy()
            made = client.create("other", SIZE, block())
            client.snapshot("other", made.volume_id)
            client.delete_snapshot(f"{group_id(fake)}/snap-other")
            client.delete(made.volume_id)
        except grpc.RpcError as error:
            raise AssertionError(f"{name} {key}={value[:20]}: {error}") from error
        own.clear()
        own |= before


@pytest.mark.parametrize("chunk", ["0", "7", "\u00b2", "9" * 900, str(100 << 10), str(2 << 30)])
def test_the_promise_of_a_pool_with_an_odd_chunk_is_kept(
    client: Client, fake: FakeHost, chunk: str
) -> None:
    client.create("t", 400 * MIB, block(), parameters={"class": "thin"})
    room = client.capacity().available_capacity
    own = own_tags(fake, "pool-thin")
    own -= {one for one in set(own) if one.startswith("carver.chunk=")}
    own.add(tags.format_one(tag.CHUNK, chunk))
    assert client.capacity().available_capacity == room
    with expect.code("RESOURCE_EXHAUSTED", "lost a tag"):
        client.create("u", SIZE, block(), parameters={"class": "thin"})
    assert not allocation.is_own_pool(report.read(fake.lvm).group("data").volume("pool-thin"))


@pytest.mark.parametrize("own", [(), ("--addtag", "carver.name=1"), ("--addtag", "other=1")])
@pytest.mark.parametrize("call", ["expand to the same", "expand", "delete"])
def test_a_volume_with_the_name_of_a_reservation_is_not_removed(
    client: Client, fake: FakeHost, own: tuple[str, ...], call: str
) -> None:
    made = client.create("1", SIZE, block(), parameters={"class": "zeroed"})
    words = ("--yes", "--wipesignatures", "y", "--zero", "y", "--activate", "y", "--type", "linear")
    fake.lvm("lvcreate", *words, *own, "--size", f"{SIZE}b", "--name", "grow-vol-1", "--", "data")
    if call == "delete":
        client.delete(made.volume_id)
    elif call == "expand":
        with expect.code("ABORTED", "already exists"):
            client.expand(made.volume_id, 2 * SIZE)
    else:
        client.expand(made.volume_id, SIZE)
    assert "grow-vol-1" in fake.lvm2.groups["data"].volumes


REFUSED = Result(5, "", "  device-mapper: reload ioctl on failed: Input/output error\n")


@pytest.mark.parametrize("left", ["suspended", "unmade"])
def test_a_volume_that_lvm2_does_not_repair_keeps_no_other(
    client: Client, service: Service, fake: FakeHost, config: Config, left: str
) -> None:
    thin = {"class": "thin"}
    client.create("t", SIZE, block(), parameters=thin)
    sick = client.create("sick", SIZE, block(), parameters=thin if left == "unmade" else {})
    other = client.create("other", SIZE, block())
    snapshot = client.snapshot("s", other.volume_id)
    client.create("deleted", SIZE, block())
    service.stop()
    if left == "unmade":
        fake.unmake_thin("data", "pool-thin", "vol-sick")
    else:
        fake.suspend("data", "vol-sick")
    deleted = own_tags(fake, "vol-deleted")
    deleted.remove("carver.state=ready")
    deleted.add("carver.state=wiping")

    def refuse(words: Sequence[str]) -> Result | None:
        repairs = words[0] == "lvm" and ("--refresh" in words or words[1] == "lvremove")
        return REFUSED if repairs and words[-1] == "data/vol-sick" else None

    fake.intercept = refuse
    again = serving.start(config, fake)
    assert not again.unrecovered
    expect.soon(lambda: "vol-deleted" not in fake.lvm2.groups["data"].volumes)
    with Client(config.endpoint) as caller:
        caller.create("new", SIZE, block())
        caller.expand(caller.create("new", SIZE, block()).volume_id, 2 * SIZE)
        caller.delete_snapshot(snapshot.snapshot_id)
        caller.delete(other.volume_id)
        for call in (
            lambda: caller.expand(sick.volume_id, 2 * SIZE),
            lambda: caller.snapshot("of-sick", sick.volume_id),
            lambda: caller.delete(sick.volume_id),
        ):
            with expect.code("INTERNAL", "Input/output error"):
                call()
        fake.intercept = lambda _words: None
        caller.delete(sick.volume_id)
    again.stop()


def test_a_deleted_volume_that_stays_suspended_is_not_written_to(
    client: Client, service: Service, fake: FakeHost, config: Config
) -> None:
    for name in ("sick", "well"):
        client.create(name, SIZE, block())
        own = own_tags(fake, f"vol-{name}")
        own.remove("carver.state=ready")
        own.add("carver.state=wiping")
    service.stop()
    fake.suspend("data", "vol-sick")

    def refuse(words: Sequence[str]) -> Result | None:
        return REFUSED if "--refresh" in words else None

    fake.intercept = refuse
    again = serving.start(config, fake)
    expect.soon(lambda: "vol-well" not in fake.lvm2.groups["data"].volumes)
    [problem] = again.unrecovered.values()
    assert "Input/output error" in problem
    assert "vol-sick" in fake.lvm2.groups["data"].volumes
    fake.intercept = lambda _words: None
    serving.recover(again)
    expect.soon(lambda: "vol-sick" not in fake.lvm2.groups["data"].volumes)
    again.stop()


def test_what_was_given_up_and_only_a_newer_version_knows_is_not_removed(
    client: Client, service: Service, fake: FakeHost, config: Config
) -> None:
    large = client.create("large", SIZE, block())
    client.snapshot("s", large.volume_id)
    service.stop()
    for name in ("vol-large", "snap-s"):
        own = own_tags(fake, name)
        own.remove("carver.state=ready")
        own |= {"carver.state=wiping", "carver.givenUp=yes", "carver.needs=moonlight"}
    fake.lose_disk("data", 0)
    again = serving.start(config, fake)
    in_background.ended(again.freed_eraser.jobs)
    again.stop()
    assert {"vol-large", "snap-s"} <= set(fake.lvm2.groups["data"].volumes)


@pytest.mark.parametrize("access", ["", "carver.access=odd"], ids=["lost", "odd"])
def test_a_volume_of_which_no_tag_says_how_it_is_accessed_is_not_formatted(
    client: Client, fake: FakeHost, tmp_path: Path, access: str
) -> None:
    raw, used = client.create("raw", SIZE, block()), client.create("used", SIZE)
    # No signature that a probe knows.
    fake.write_bytes(device(fake, "data", "vol-raw"), 0, DATA)
    client.stage(used, tmp_path / "used")
    client.unstage(used.volume_id, tmp_path / "used")
    expect.soon(lambda: "carver.formatted=ext4" in own_tags(fake, "vol-used"))
    for name in ("vol-raw", "vol-used"):
        own = own_tags(fake, name)
        own -= {"carver.access=block", "carver.access=mount"}
        own |= {access} - {""}
    with expect.code("FAILED_PRECONDITION", "no `access`", "lvs -o +tags"):
        client.stage(raw, tmp_path / "raw")
    assert fake.read_bytes(device(fake, "data", "vol-raw"), 0, len(DATA)) == DATA
    with expect.code("FAILED_PRECONDITION", "no `access`"):
        client.create("copy", SIZE, source=of_volume(raw.volume_id))
    client.stage(raw, tmp_path / "raw", block())
    # One that was formatted is for mounts.
    client.stage(used, tmp_path / "used")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *((key, "vol-1") for key in (tag.SIZE, tag.FS_TYPE)),
        *((key, "snap-1") for key in (tag.SIZE, tag.SEQUENCE)),
    ],
)
def test_no_data_are_copied_by_one_of_two_values(
    client: Client, fake: FakeHost, key: str, name: str
) -> None:
    volume = client.create("1", SIZE, mounted("btrfs" if key == tag.FS_TYPE else "ext4"))
    snapshot = client.snapshot("1", volume.volume_id)
    own_tags(fake, name).add(tags.format_one(key, "77"))
    is_snapshot = name.startswith("snap")
    source = of_snapshot(snapshot.snapshot_id) if is_snapshot else of_volume(volume.volume_id)
    with expect.code("FAILED_PRECONDITION", f"`{key}` twice"):
        client.create("copy", 0, mounted(), source=source)
    # It is shown, and none gets its number.
    assert [one.snapshot_id for one in client.snapshots()] == [snapshot.snapshot_id]
    assert len(client.volumes()) == 1


def test_the_number_of_a_snapshot_is_above_each_that_is_there_twice(
    client: Client, fake: FakeHost
) -> None:
    volume = client.create("1", SIZE, block())
    client.snapshot("1", volume.volume_id)
    own_tags(fake, "snap-1").add("carver.sequence=17")
    client.snapshot("2", volume.volume_id)
    assert "carver.sequence=18" in own_tags(fake, "snap-2")


def test_a_thin_snapshot_without_its_size_is_as_large_as_it_is(
    client: Client, fake: FakeHost
) -> None:
    volume = client.create("1", SIZE, block(), parameters={"class": "thin"})
    client.snapshot("1", volume.volume_id)
    client.expand(volume.volume_id, 2 * SIZE)
    own_tags(fake, "snap-1").remove(f"carver.size={SIZE}")
    assert [one.size_bytes for one in client.snapshots()] == [SIZE]


def test_a_deleted_snapshot_with_damaged_tags_is_not_called_gone(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("1", SIZE, block())
    snapshot = client.snapshot("1", volume.volume_id)
    # As a kill leaves it that came before its data were erased.
    fake.lvm("lvconvert", "--yes", "--splitsnapshot", "--", "data/snap-1")
    own_tags(fake, "snap-1").add("carver.source=vol-2")
    with expect.code("FAILED_PRECONDITION", "`source` twice"):
        client.delete_snapshot(snapshot.snapshot_id)
    own_tags(fake, "snap-1").remove("carver.source=vol-2")
    client.delete_snapshot(snapshot.snapshot_id)
    expect.soon(lambda: "snap-1" not in fake.lvm2.groups["data"].volumes)
