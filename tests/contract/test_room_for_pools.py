"""Pools and COW stores grow beside a sweep of free extents, and before what would wait for them."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import configured
import expect
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, device, logical, lvm2_commands, names

from agent.csi.client import block, of_volume
from agent.daemon.server import Service
from agent.operations import erase_free
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from lvm.layout import Reserve
from lvm.thin import Policy

MIB = 1 << 20
EXTENT = 4 * MIB
MARKED = "carver.sweep=yes"
pytestmark = [
    pytest.mark.groups(data=[60]),
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            replace(configured.THIN, pool=Policy(size=Reserve(size_bytes=4 * EXTENT))),
        )
    ),
]


class Sweep:
    """A sweep whose zeroing waits at its first piece for `go`, or until it is called off."""

    def __init__(self, host: AnyHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._zero_out, self.service = host.kernel.zero_out, list[Service]()
        monkeypatch.setattr(host.kernel, "zero_out", self)

    def __call__(self, path: str, *where: Any, **more: Any) -> None:
        if path.endswith("sweep"):
            self.begun.set()
            [job] = self.service[-1].freed_eraser.jobs.unfinished()
            expect.soon(lambda: self.go.is_set() or job.cancelled.is_set())
        self._zero_out(path, *where, **more)


@pytest.fixture
def sweep(
    host: AnyHost, group: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sweep]:
    made = Sweep(host, monkeypatch)
    made.service.append(service)
    yield made
    made.go.set()
    # A real group is another test's afterwards.
    expect.soon(lambda: not report.read(host.lvm).group(group).own_tags)


def fill(host: AnyHost, group: str, name: str, size_bytes: int) -> None:
    for at in range(0, size_bytes, MIB):
        host.write_bytes(device(host, group, name), at, b"contents" * (MIB // 8))


def extents(host: AnyHost, group: str, name: str) -> int:
    return logical(host, group, name).size_bytes // EXTENT


@pytest.mark.parametrize("takes_all", [False, True], ids=["a slice", "all that is free"])
@pytest.mark.long_on_lvm
def test_a_pool_grows_while_free_extents_are_overwritten(
    client: Client,
    service: Service,
    host: AnyHost,
    group: str,
    sweep: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    takes_all: bool,
) -> None:
    if not takes_all:
        monkeypatch.setattr(erase_free, "_SMALLEST_SLICE_BYTES", 10 * EXTENT)
    client.create("pvc-1", 20 * EXTENT, block(), parameters={"class": "thin"})
    host.lvm("vgchange", "--addtag", MARKED, "--", group)
    service.freed_eraser.start(group)
    assert sweep.begun.wait(expect.PATIENCE_SECONDS)
    assert (report.read(host.lvm).group(group).disks[0].unallocated_extents == 0) is takes_all
    fill(host, group, "vol-pvc-1", 15 * MIB)
    assert service.autoextender.step(0)
    assert extents(host, group, "pool-thin") > 4
    assert "unclean" in logical(host, group, "pool-thin").own_tags
    # The rest is overwritten all the same, and volumes get it afterwards.
    sweep.go.set()
    expect.soon(lambda: not report.read(host.lvm).group(group).own_tags)
    client.create("pvc-2", EXTENT, block())


@pytest.mark.groups(data=[20, 20])
@pytest.mark.parametrize("policy", ["contiguous", "cling"])
def test_free_extents_in_many_pieces_are_overwritten_whatever_the_policy_of_the_group(
    client: Client, service: Service, host: AnyHost, group: str, policy: str
) -> None:
    every = [client.create(f"pvc-{number}", 4 * EXTENT, block()) for number in range(10)]
    for one in every[::2]:
        client.delete(one.volume_id)
    host.lvm("vgchange", "--alloc", policy, "--addtag", MARKED, "--", group)
    try:
        service.freed_eraser.start(group)
        expect.soon(lambda: not report.read(host.lvm).group(group).own_tags)
    finally:
        host.lvm("vgchange", "--alloc", "normal", "--", group)


@pytest.mark.long_on_lvm
def test_a_cow_store_grows_while_free_extents_are_overwritten(
    client: Client, service: Service, host: AnyHost, group: str, sweep: Sweep
) -> None:
    source = client.create("pvc-1", 8 * EXTENT, block())
    client.snapshot("s", source.volume_id, {"size": str(2 * EXTENT)})
    host.lvm("vgchange", "--addtag", MARKED, "--", group)
    service.freed_eraser.start(group)
    assert sweep.begun.wait(expect.PATIENCE_SECONDS)
    fill(host, group, "vol-pvc-1", 7 * MIB)
    assert service.autoextender.step(0)
    assert extents(host, group, "snap-s") > 2


@pytest.mark.long_on_lvm
def test_what_a_pool_grew_into_before_it_was_overwritten_is_overwritten_after_it(
    client: Client, service: Service, host: AnyHost, group: str, sweep: Sweep
) -> None:
    made = client.create("pvc-1", 20 * EXTENT, block(), parameters={"class": "thin"})
    host.lvm("vgchange", "--addtag", MARKED, "--", group)
    fill(host, group, "vol-pvc-1", 15 * MIB)
    service.reports.fresh()
    assert service.autoextender.step(0)
    host.lvm("vgchange", "--deltag", MARKED, "--", group)
    client.delete(made.volume_id)
    assert sweep.begun.wait(expect.PATIENCE_SECONDS)
    assert names(host, group) == {"sweep"}
    sweep.go.set()
    expect.soon(lambda: not names(host, group))


@pytest.mark.long_on_lvm
def test_a_disk_that_a_move_filled_is_not_swept_though_carver_was_restarted(
    host: AnyHost, config: Config
) -> None:
    old, new = (host.new_device(61 * EXTENT) for _ in range(2))
    with host.own_group("zzmoved", [old]):
        config = replace(config, classes=(DeviceClass("plain", "zzmoved", default=True),))
        with serving.served(host, config) as (_, client):
            made = client.create("pvc-1", 10 * EXTENT, block())
            assert client.replace_disk(old, new)[0] is False
        with serving.served(host, config) as (service, client):
            expect.soon(lambda: client.replace_disk(old, new)[0])
            assert not service.freed_eraser.jobs.counts()["running"]
            assert not report.read(host.lvm).group("zzmoved").own_tags
            client.delete(made.volume_id)


@pytest.mark.parametrize("what", ["a snapshot", "a clone", "another clone", "a group snapshot"])
def test_a_full_pool_is_extended_before_one_of_its_volumes_is_suspended(
    client: Client, host: AnyHost, group: str, what: str
) -> None:
    """A suspend waits for writes that wait for room, and holds the lock that growth takes."""
    made = client.create("pvc-1", 20 * EXTENT, block(), parameters={"class": "thin"})
    fill(host, group, "vol-pvc-1", 4 * EXTENT)
    assert extents(host, group, "pool-thin") == 4
    host.commands.clear()
    match what:
        case "a snapshot":
            client.snapshot("s", made.volume_id)
        case "a group snapshot":
            client.group_snapshot("s", [made.volume_id])
        case _:
            where = {"class": "thin" if what == "a clone" else "plain"}
            of = of_volume(made.volume_id)
            client.create("clone", 20 * EXTENT, block(), parameters=where, source=of)
    changes = [one for one in lvm2_commands(host) if one in ("lvextend", "lvcreate")]
    assert changes[:2] == ["lvextend", "lvcreate"]
    assert extents(host, group, "pool-thin") > 4
