"""Thin classes: a pool is made when needed, promised within bounds, given back when empty."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import in_background
import pytest
import tiers
from real.any import AnyHost, device

from agent.csi.client import Client, block, of_snapshot, of_volume
from agent.daemon.server import Service
from lvm import report
from lvm.layout import Reserve
from lvm.room import Room
from lvm.thin import Policy
from mount.command import Result

MIB = 1 << 20
EXTENT = 4 * MIB
THIN, TWICE = {"class": "thin"}, {"class": "twice"}
POOL = Reserve(size_bytes=8 * MIB)
pytestmark = [
    # Thirty extents, on two disks.
    pytest.mark.groups(data=[18, 12]),
    pytest.mark.settings(
        classes=(
            replace(configured.PLAIN, name="thick"),
            replace(configured.THIN, pool=Policy(size=POOL)),
            replace(
                configured.THIN,
                name="twice",
                reserve=Reserve(size_bytes=16 * MIB),
                pool=Policy(2.0, POOL, chunk_size_bytes=256 << 10),
            ),
        )
    ),
]


@pytest.fixture(autouse=True)
def free(host: AnyHost, group: str, client: Client) -> Iterator[None]:
    """In the end all is deleted, and the group's free extents are what they were."""
    yield
    tiers.empty(client)
    left = report.read(host.lvm).group(group)
    assert (Room(left).free_extents, set(left.volumes)) == (30, set())


def maximum(client: Client, parameters: dict[str, str]) -> int:
    return client.capacity(parameters).maximum_volume_size.value


def started(host: AnyHost) -> list[str]:
    words = [" ".join(one[:2]) for one in host.commands]
    host.commands.clear()
    return words


@pytest.mark.long_on_lvm
def test_the_first_volume_makes_the_pool_and_others_cost_as_much_as_thick_ones(
    client: Client, host: AnyHost, group: str
) -> None:
    host.commands.clear()
    first = client.create("pvc-1", 40 * MIB, block(), parameters=THIN)
    assert started(host) == ["lvm fullreport", "lvm lvcreate", "lvm lvcreate"]
    client.create("pvc-2", 40 * MIB, block(), parameters=THIN)
    assert started(host) == ["lvm fullreport", "lvm lvcreate"]
    client.create("pvc-2", 40 * MIB, block(), parameters=THIN)
    assert started(host) == ["lvm fullreport"]
    found = report.read(host.lvm).group(group)
    # The data, the metadata, the metadata's spare.
    assert Room(found).free_extents == 30 - 2 - 1 - 1
    assert found.spare_extents == 1
    pool = found.volume("pool-thin")
    assert (pool.size_bytes, pool.metadata_size_bytes) == (8 * MIB, 4 * MIB)
    assert found.volume("vol-pvc-1").pool == found.volume("vol-pvc-2").pool == "pool-thin"
    host.commands.clear()
    client.delete(first.volume_id)
    assert started(host) == ["lvm lvremove"]


@pytest.mark.parametrize(
    "is_wanted", chosen.kinds([True, False], usual=[True]), ids=["created", "given up"]
)
@pytest.mark.long_on_lvm
def test_a_half_made_pool_is_made_again_or_removed(
    client: Client, host: AnyHost, group: str, staging: Path, service: Service, is_wanted: bool
) -> None:
    client.create("pvc-1", 40 * MIB, block(), parameters=THIN)
    host.lvm("lvremove", "--yes", "--", f"{group}/vol-pvc-1")
    host.half_make_pool(group, "pool-thin")
    if is_wanted:
        volume = client.create("pvc-1", 40 * MIB, block(), parameters=THIN)
        client.stage(volume, staging, block())
        client.unstage(volume.volume_id, staging)
    else:
        assert in_background.look(service, service.pool_remover.jobs) == 1
        in_background.ended(service.pool_remover.jobs)
        assert not report.read(host.lvm).group(group).volumes


@pytest.mark.parametrize("is_pool_active", [True, False], ids=["active pool", "inactive pool"])
@pytest.mark.long_on_lvm
def test_a_volume_that_lvm2_died_while_making_is_made_anew_or_deleted(
    client: Client, host: AnyHost, group: str, staging: Path, is_pool_active: bool
) -> None:
    """It cannot be activated before the pool's next change, and nothing was ever in it."""
    volume = client.create("pvc-1", 40 * MIB, block(), parameters=THIN)
    host.unmake_thin(group, "pool-thin", "vol-pvc-1")
    if not is_pool_active:
        host.deactivate(group, "pool-thin")
    again = client.create("pvc-1", 40 * MIB, block(), parameters=THIN)
    assert again.volume_id == volume.volume_id
    client.stage(again, staging, block())
    client.unstage(again.volume_id, staging)
    other = client.create("pvc-2", 40 * MIB, block(), parameters=THIN)
    host.unmake_thin(group, "pool-thin", "vol-pvc-2")
    client.delete(other.volume_id)
    assert "vol-pvc-2" not in report.read(host.lvm).group(group).volumes
    # One that is there, and only inactive, stays.
    host.deactivate(group, "vol-pvc-1")
    assert client.create("pvc-1", 40 * MIB, block(), parameters=THIN).volume_id == volume.volume_id


@pytest.mark.long_on_lvm
def test_a_snapshot_that_lvm2_died_while_making_has_what_the_volume_has_when_it_is_repeated(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 16 * MIB, block(), parameters=THIN)
    node = device(host, group, "vol-pvc-1")
    host.write_bytes(node, 0, b"old!" * 1024)
    client.snapshot("snap", volume.volume_id)
    host.unmake_thin(group, "pool-thin", "snap-snap")
    host.write_bytes(node, 0, b"new!" * 1024)
    snapshot = client.snapshot("snap", volume.volume_id)
    host.write_bytes(node, 0, b"then" * 1024)
    source = of_snapshot(snapshot.snapshot_id)
    client.create("copy", 16 * MIB, block(), parameters=THIN, source=source)
    assert host.read_bytes(device(host, group, "vol-copy"), 0, 4096) == b"new!" * 1024


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((), id="gone", marks=pytest.mark.variation),
        pytest.param(("_tdata", "_tmeta"), id="left in parts"),
    ],
)
@pytest.mark.long_on_lvm
def test_a_volume_whose_pool_is_not_active_is_staged(
    client: Client, host: AnyHost, group: str, staging: Path, parts: tuple[str, ...]
) -> None:
    volume = client.create("pvc-1", 20 * MIB, parameters=THIN)
    host.deactivate(group, "vol-pvc-1")
    if parts:
        host.leave_parts(group, "pool-thin", *parts)
    else:
        host.deactivate(group, "pool-thin")
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)


@pytest.mark.variation
def test_a_pool_promises_what_it_can_become_and_not_one_extent_more(client: Client) -> None:
    assert maximum(client, THIN) == 28 * EXTENT
    client.create("pvc-1", 12 * EXTENT, block(), parameters=THIN)
    assert maximum(client, THIN) == 16 * EXTENT
    with expect.code("RESOURCE_EXHAUSTED", str(16 * EXTENT), "1 times"):
        client.create("pvc-2", 17 * EXTENT, block(), parameters=THIN)
    client.create("pvc-2", 16 * EXTENT, block(), parameters=THIN)
    assert maximum(client, THIN) == 0


@pytest.mark.variation
def test_an_over_provisioned_pool_promises_a_multiple(client: Client) -> None:
    # Less the metadata, their spare, and the reserve of four extents.
    assert maximum(client, TWICE) == 2 * 24 * EXTENT
    with expect.code("RESOURCE_EXHAUSTED", "2 times"):
        client.create("pvc-1", 49 * EXTENT, block(), parameters=TWICE)
    volume = client.create("pvc-1", 48 * EXTENT, block(), parameters=TWICE)
    assert volume.capacity_bytes == 48 * EXTENT
    assert maximum(client, TWICE) == 0


@pytest.mark.variation
def test_other_classes_keep_free_what_a_pool_promised(client: Client) -> None:
    client.create("pvc-1", 10 * EXTENT, block(), parameters=THIN)
    # Two extents of data are there, eight are promised.
    assert maximum(client, {"class": "thick"}) == (30 - 4 - 8) * EXTENT
    client.create("pvc-2", 18 * EXTENT, block(), parameters={"class": "thick"})
    assert maximum(client, THIN) == 0
    with expect.code("RESOURCE_EXHAUSTED"):
        client.create("pvc-3", EXTENT, block(), parameters={"class": "thick"})


@pytest.mark.variation
def test_two_pools_share_a_group_and_each_keeps_its_promises(client: Client) -> None:
    client.create("pvc-1", 10 * EXTENT, block(), parameters=THIN)
    # Ten extents of the other pool's data, three of metadata with one spare, four of reserve.
    assert maximum(client, TWICE) == 2 * (30 - 10 - 3 - 4) * EXTENT
    client.create("pvc-2", 26 * EXTENT, block(), parameters=TWICE)
    assert maximum(client, TWICE) == 0
    assert maximum(client, THIN) == 4 * EXTENT


@pytest.mark.variation
def test_a_thin_volume_grows_within_what_its_pool_may_promise(client: Client) -> None:
    volume = client.create("pvc-1", 10 * EXTENT, block(), parameters=THIN)
    with expect.code("OUT_OF_RANGE"):
        client.expand(volume.volume_id, 29 * EXTENT)
    assert client.expand(volume.volume_id, 28 * EXTENT).capacity_bytes == 28 * EXTENT


@pytest.mark.variation
def test_a_volume_of_the_same_name_but_thick_is_another(client: Client) -> None:
    client.create("pvc-1", EXTENT, block(), parameters=THIN)
    with expect.code("ALREADY_EXISTS"):
        client.create("pvc-1", EXTENT, block(), parameters={"class": "thick"})


@pytest.mark.variation
def test_a_volume_in_use_is_not_deleted(client: Client, staging: Path) -> None:
    volume = client.create("pvc-1", 20 * MIB, parameters=THIN)
    client.stage(volume, staging)
    with expect.code("FAILED_PRECONDITION", "mounted"):
        client.delete(volume.volume_id)
    client.unstage(volume.volume_id, staging)


@pytest.mark.long_on_lvm
def test_dmeventd_watches_neither_a_pool_nor_a_cow_store(
    client: Client, service: Service, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 5 * EXTENT, block(), parameters=THIN)
    thick = client.create("pvc-2", 8 * EXTENT, block())
    snapshots = [client.snapshot("snap-1", volume.volume_id)]
    snapshots.append(client.snapshot("snap-2", thick.volume_id, {"size": "4Mi"}))
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"x" * (2 * EXTENT))
    assert service.autoextender.step(0)
    assert host.watched(group) == set()


def test_a_pool_goes_with_its_last_volume_and_is_overwritten_first(
    client: Client, host: AnyHost, group: str
) -> None:
    first, second = (client.create(one, 8 * MIB, block(), parameters=THIN) for one in "ab")
    client.delete(first.volume_id)
    assert "pool-thin" in report.read(host.lvm).group(group).volumes
    host.commands.clear()
    client.delete(second.volume_id)
    assert started(host) == [
        *("lvm fullreport", "lvm lvremove"),
        *("lvm fullreport", "lvm lvcreate", "lvm fullreport", "lvm lvremove"),
    ]
    assert Room(report.read(host.lvm).group(group)).free_extents == 30


def test_a_pool_that_leaked_a_chunk_is_overwritten_whole_and_given_back(
    client: Client, service: Service, host: AnyHost, group: str
) -> None:
    mark = b"a secret".ljust(4096, b"!")
    earlier, last = (
        client.create(name, 8 * MIB, block(), parameters=TWICE) for name in ("pvc-1", "pvc-2")
    )
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, mark)
    client.delete(earlier.volume_id)
    host.leak_chunk(group, "pool-twice", "vol-pvc-2")
    left = []

    def look(words: Sequence[str]) -> None:
        """At what is on the extents that are about to be free."""
        if "lvremove" in words and words[-1] == f"{group}/pool-twice":
            data = host.devices.pool_data(group, "pool-twice")
            left.append(host.read_bytes(data, 0, host.kernel.device_size_bytes(data)))

    host.intercept = look
    with host.impatient():
        client.delete(last.volume_id)
        service.pool_remover.remove_if_empty(group, "pool-twice").result(600)
    assert left == [bytes(len(left[0]))]


@pytest.mark.variation
def test_a_pool_that_an_earlier_process_left_empty_is_given_back(
    client: Client, service: Service, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 8 * MIB, block(), parameters=THIN)
    host.lvm("lvremove", "--yes", "--", f"{group}/vol-pvc-1")
    service.reports.fresh()
    assert in_background.look(service, service.pool_remover.jobs) == 1
    service.pool_remover.remove_if_empty(group, "pool-thin").result(600)
    assert Room(report.read(host.lvm).group(group)).free_extents == 30
    client.delete(volume.volume_id)


# Snapshots and copies


@pytest.mark.variation
def test_a_thin_snapshot_is_made_in_two_commands_and_is_whole_without_its_origin(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 16 * MIB, block(), parameters=THIN)
    path = device(host, group, "vol-pvc-1")
    host.write_bytes(path, 4 * MIB, b"before  " * 512)
    started(host)
    snapshot = client.snapshot("1", volume.volume_id)
    assert started(host) == ["lvm fullreport", "lvm lvcreate"]
    assert (snapshot.ready_to_use, snapshot.size_bytes) == (True, 16 * MIB)
    made = report.read(host.lvm).group(group).volume("snap-1")
    assert (made.origin, made.read_only) == ("vol-pvc-1", True)
    host.write_bytes(path, 4 * MIB, b"after   " * 512)
    client.delete(volume.volume_id)
    assert client.snapshots() == [snapshot]
    copy = client.create("pvc-2", 0, block(), source=of_snapshot(snapshot.snapshot_id))
    copied = device(host, group, "vol-pvc-2")
    assert host.read_bytes(copied, 4 * MIB, 4096) == b"before  " * 512
    client.delete(copy.volume_id)
    started(host)
    client.delete_snapshot(snapshot.snapshot_id)
    assert started(host)[:2] == ["lvm fullreport", "lvm lvremove"]


@pytest.mark.variation
def test_a_thin_snapshot_counts_towards_what_its_pool_promised(client: Client) -> None:
    room = maximum(client, THIN)
    volume = client.create("pvc-1", 2 * EXTENT, block(), parameters=THIN)
    assert maximum(client, THIN) == room - 2 * EXTENT
    client.snapshot("1", volume.volume_id)
    assert maximum(client, THIN) == room - 4 * EXTENT
    client.create("pvc-2", room - 5 * EXTENT, block(), parameters=THIN)
    with expect.code("RESOURCE_EXHAUSTED"):
        client.snapshot("2", volume.volume_id)


@pytest.mark.variation
@pytest.mark.parametrize("to", ["thin", "thick", "twice"])
def test_thin_volumes_are_copied_to_any_class_and_leave_no_snapshot(
    client: Client, host: AnyHost, group: str, to: str
) -> None:
    volume = client.create("pvc-1", 8 * MIB, block(), parameters=THIN)
    host.write_bytes(device(host, group, "vol-pvc-1"), 4 * MIB, b"contents" * 512)
    source = of_volume(volume.volume_id)
    copy = client.create("pvc-2", 12 * MIB, block(), parameters={"class": to}, source=source)
    assert copy.capacity_bytes == 12 * MIB
    copied = device(host, group, "vol-pvc-2")
    assert host.read_bytes(copied, 4 * MIB, 4096) == b"contents" * 512
    left = set(report.read(host.lvm).group(group).volumes)
    assert not {name for name in left if name.startswith(("copy", "snap"))}


def test_a_thin_volume_grows_under_its_snapshots(client: Client) -> None:
    volume = client.create("pvc-1", 8 * MIB, block(), parameters=THIN)
    client.snapshot("1", volume.volume_id)
    assert client.expand(volume.volume_id, 16 * MIB).capacity_bytes == 16 * MIB
    assert client.snapshots()[0].size_bytes == 8 * MIB


@pytest.mark.variation
def test_a_copy_within_a_pool_is_made_in_an_instant_and_grown_where_it_is_larger(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 8 * MIB, block(), parameters=THIN)
    host.write_bytes(device(host, group, "vol-pvc-1"), 4 * MIB, b"contents" * 512)
    snapshot = client.snapshot("1", volume.volume_id)
    started(host)
    of = of_snapshot(snapshot.snapshot_id)
    copy = client.create("pvc-2", 0, block(), parameters=THIN, source=of)
    assert started(host) == ["lvm fullreport", "lvm lvcreate"]
    larger = client.create(
        "pvc-3", 12 * MIB, block(), parameters=THIN, source=of_volume(volume.volume_id)
    )
    assert started(host) == ["lvm fullreport", "lvm lvcreate", "lvm lvextend", "lvm lvchange"]
    assert (copy.capacity_bytes, larger.capacity_bytes) == (8 * MIB, 12 * MIB)
    assert client.create("pvc-2", 0, block(), parameters=THIN, source=of) == copy
    client.delete(volume.volume_id)
    client.delete_snapshot(snapshot.snapshot_id)
    for name in ("vol-pvc-2", "vol-pvc-3"):
        assert host.read_bytes(device(host, group, name), 4 * MIB, 4096) == b"contents" * 512


NO_ROOM = '  Volume group "x" has insufficient free space (0 extents): 6 required.'


@pytest.mark.variation
def test_a_volume_that_lacks_room_while_it_is_filled_is_made_on_another_node(
    client: Client, host: AnyHost, group: str
) -> None:
    """After RESOURCE_EXHAUSTED the external-provisioner asks another node, and never this one."""
    of = client.create("source", 24 * MIB, block(), parameters=THIN)
    before = set(report.read(host.lvm).group(group).volumes)

    def full(words: Sequence[str]) -> Result | None:
        return Result(5, "", NO_ROOM) if words[:2] == ("lvm", "lvextend") else None

    host.intercept = full
    with expect.code("RESOURCE_EXHAUSTED", "insufficient free space"):
        client.create("copy", 48 * MIB, block(), parameters=THIN, source=of_volume(of.volume_id))
    host.intercept = lambda _words: None
    expect.soon(lambda: set(report.read(host.lvm).group(group).volumes) == before)
