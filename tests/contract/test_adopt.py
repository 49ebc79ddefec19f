"""Logical volumes that Carver did not make become volumes of its own, with what they hold.

They are made as each other driver makes its own: names, tags, layouts.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import in_background
import pytest
from csi_client import Client
from fakes.host import FakeHost
from real.any import AnyHost, device, logical, lvm2_commands, names
from real.host import RealHost
from serving import served

from agent.csi.client import block, mounted
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import layout, report, thin, volumes
from lvm.layout import Layout, Reserve
from lvm.volumes import New
from mount import filesystem, luks, mounts, options
from mount.command import Result
from mount.luks import Cryptsetup
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

MIB = 1 << 20
UID = "0b1e2d7a-52c1-4c7e-9f0f-6f2f8f1f9a01"
CSI_DRIVER_LVM = ("--addtag", "lv.metal-stack.io/csi-lvm-driver")
MARK = b"kept  by".ljust(4096, b".")
LAYOUTS = {
    "linear": Layout(),
    "striped": Layout("striped", stripes=2),
    "raid1": Layout("raid1", mirrors=1),
}
# The driver, its logical volume's name, layout and tags.
MADE = {
    "csi-driver-lvm": ("csi-driver-lvm", f"pvc-{UID}", "linear", CSI_DRIVER_LVM),
    "csi-driver-lvm, striped": ("csi-driver-lvm", f"pvc-{UID}", "striped", CSI_DRIVER_LVM),
    "csi-driver-lvm, mirror": ("csi-driver-lvm", f"pvc-{UID}", "raid1", CSI_DRIVER_LVM),
    "topolvm": ("topolvm", UID, "linear", ()),
    "openebs": ("openebs", f"pvc-{UID}", "linear", ()),
    "by hand": ("", "data_1", "linear", ("--addtag", "mine")),
}
pytestmark = [
    pytest.mark.groups(data=[100, 60], other=[20]),
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            replace(configured.FULL, name="clean"),
            configured.THIN,
            configured.SEALED,
            DeviceClass("elsewhere", "other"),
        )
    ),
]


def make(
    host: AnyHost, group: str, name: str, kind: str = "linear", tags: Sequence[str] = ()
) -> str:
    """Have lvm2 make a logical volume of 64 MiB; return its device."""
    host.lvm(
        *("lvcreate", "--yes", "--wipesignatures", "y", "--zero", "y", "--activate", "y"),
        *LAYOUTS[kind].words(),
        *("--size", f"{64 * MIB}b", *tags, "--name", name, "--", group),
    )
    return device(host, group, name)


@contextmanager
def mounted_at(host: AnyHost, path: str) -> Iterator[Path]:
    """A mount by another than Carver."""
    place = host.directory / "elsewhere"
    place.mkdir(exist_ok=True)
    mounts.ensure_mounted(host.kernel, path, str(place), "ext4", options.parse((), "ext4"))
    yield place
    host.kernel.unmount(str(place))


def asked(group: str, name: str, made_by: str = "", **more: object) -> carver.AdoptVolumeRequest:
    request = carver.AdoptVolumeRequest(group=group, logical_volume=name, made_by=made_by)
    for key, value in more.items():
        setattr(request, key, value)
    return request


def state(host: AnyHost, group: str) -> object:
    """What lvm2 keeps of a group's volumes, and which are active."""
    every = report.read(host.lvm).group(group).volumes.values()
    return {one.name: (one.uuid, one.tags, one.layout, one.ranges, one.active) for one in every}


@pytest.mark.parametrize("kind", chosen.kinds(MADE, usual=["topolvm"]))
@pytest.mark.long_on_lvm
def test_another_driver_s_volume_is_adopted_with_its_data(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path, kind: str
) -> None:
    made_by, name, shape, tags = MADE[kind]
    path = make(host, group, name, shape, tags)
    host.write(path, "ext4")
    with mounted_at(host, path) as place:
        (place / "file").write_text("kept")
    before = filesystem.probe(host.kernel, path)
    old = logical(host, group, name)

    # A dry run shows it all, and changes nothing.
    untouched = state(host, group)
    planned = client.adopt(asked(group, name, made_by, dry_run=True))
    assert state(host, group) == untouched
    assert len(planned.changes) == 2

    host.commands.clear()
    adopted = client.adopt(asked(group, name, made_by))
    assert adopted == planned
    assert [one for one in lvm2_commands(host) if one != "fullreport"] == ["lvchange", "lvrename"]
    new = logical(host, group, f"vol-{name}")
    assert (new.uuid, new.disks, new.size_bytes) == (old.uuid, old.disks, old.size_bytes)
    assert new.tags > old.tags
    again = client.adopt(asked(group, name, made_by))
    assert (again.volume, list(again.changes)) == (adopted.volume, [])

    volume = adopted.volume
    assert client.volumes() == [volume]
    assert volume.capacity_bytes == 64 * MIB
    assert client.confirms(volume.volume_id, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    after = filesystem.probe(host.kernel, device(host, group, f"vol-{name}"))
    assert before is not None
    assert after is not None
    assert after.uuid == before.uuid
    if isinstance(host, RealHost):
        assert (target / "file").read_text() == "kept"

    # It lives on as any other.
    taken = client.snapshot("monday", volume.volume_id)
    client.delete_snapshot(taken.snapshot_id)
    client.expand(volume.volume_id, 96 * MIB)
    assert client.node_expand(volume.volume_id, target, 96 * MIB).capacity_bytes == 96 * MIB
    assert client.stats(volume.volume_id, target).usage[0].total > 64 * MIB
    if isinstance(host, RealHost):
        assert (target / "file").read_text() == "kept"
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    assert names(host, group) == set()


@pytest.mark.variation
def test_a_raw_volume_keeps_its_data_and_is_erased_when_it_is_deleted(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path
) -> None:
    path = make(host, group, "raw")
    host.write_bytes(path, 8 * MIB, MARK)
    volume = client.adopt(asked(group, "raw", block=True)).volume
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    # In memory a published file is none that can be read.
    place = str(target) if isinstance(host, RealHost) else device(host, group, "vol-raw")
    assert host.kernel.device_size_bytes(str(target)) == 64 * MIB
    assert host.read_bytes(place, 8 * MIB, len(MARK)) == MARK
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    if isinstance(host, FakeHost):
        assert MARK not in host.freed_bytes(group)
    # On the same extents.
    assert not any(host.read_bytes(make(host, group, "next"), 8 * MIB, len(MARK)))


@pytest.mark.long_on_lvm
def test_an_inactive_volume_stays_inactive_until_it_is_staged(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    host.write(make(host, group, "data"), "ext4")
    host.deactivate(group, "data")
    volume = client.adopt(asked(group, "data")).volume
    assert host.devices.find(group, "vol-data") is None
    client.stage(volume, staging, mounted("ext4"))
    assert host.devices.find(group, "vol-data") is not None


@pytest.mark.variation
def test_a_thin_volume_in_its_class_s_pool_is_adopted(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    first = client.create("first", 64 * MIB, block(), parameters={"class": "thin"})
    thin.create(host.lvm, group, "pool-thin", New("data", 64 * MIB, {}))
    host.write(device(host, group, "data"), "ext4")
    volume = client.adopt(asked(group, "data", device_class="thin")).volume
    assert volume.volume_context["carver/class"] == "thin"
    client.stage(volume, staging, mounted("ext4"))
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    client.delete(first.volume_id)
    assert names(host, group) == set()


def in_another_pool(host: AnyHost, group: str) -> None:
    thin.create_pool(
        host.lvm,
        group,
        f"{group}_thinpool",
        data_extents=10,
        metadata_extents=1,
        extent_size_bytes=4 * MIB,
        chunk_size_bytes=65536,
        own_tags={},
    )
    thin.create(host.lvm, group, f"{group}_thinpool", New("data", 64 * MIB, {}))


def with_snapshot(host: AnyHost, group: str) -> None:
    host.write(make(host, group, "data"), "ext4")
    volumes.create_snapshot(
        host.lvm, group, "copy_1", origin="data", size_bytes=8 * MIB, own_tags={}
    )


def encrypted(host: AnyHost, group: str) -> None:
    program = Cryptsetup(host.run, waits_for_udev=luks.has_udev())
    path = make(host, group, "data")
    where = {"offset_bytes": 4 * MIB, "sector_bytes": 4096}
    program.make(path, bytearray(b"sesame"), uuid=str(uuid.uuid4()), **where)


def formatted(name: str) -> Callable[[AnyHost, str], None]:
    return lambda host, group: host.write(make(host, group, name), "ext4")


def blank(host: AnyHost, group: str) -> None:
    make(host, group, "data")


# What there is, what is asked, the code, and a word of the error.
REFUSED: dict[str, tuple[Callable[[AnyHost, str], object], dict[str, object], str, str]] = {
    "no such": (blank, {"name": "other"}, "NOT_FOUND", "other"),
    "blank": (blank, {}, "FAILED_PRECONDITION", "no file system, not ext4"),
    "encrypted": (encrypted, {}, "FAILED_PRECONDITION", "LUKS"),
    "encrypted, raw": (encrypted, {"block": True}, "FAILED_PRECONDITION", "LUKS"),
    "origin": (with_snapshot, {}, "FAILED_PRECONDITION", "the snapshots copy_1"),
    "snapshot": (with_snapshot, {"name": "copy_1"}, "FAILED_PRECONDITION", "snapshot of data"),
    "thin": (in_another_pool, {}, "FAILED_PRECONDITION", "_thinpool is not that of a class"),
    "a driver's": (formatted(UID), {"name": UID}, "FAILED_PRECONDITION", "--from topolvm"),
    "another driver's": (
        formatted(f"pvc-{UID}"),
        {"name": f"pvc-{UID}", "made_by": "topolvm"},
        "FAILED_PRECONDITION",
        "--from openebs",
    ),
    "no driver's": (
        formatted("data"),
        {"made_by": "openebs"},
        "FAILED_PRECONDITION",
        "none of these drivers",
    ),
    "an unknown driver's": (formatted("data"), {"made_by": "x"}, "INVALID_ARGUMENT", "csi-driver"),
    "a name of Carver's": (
        formatted("snap-a"),
        {"name": "snap-a"},
        "FAILED_PRECONDITION",
        "rename it first",
    ),
    "an unknown class": (
        blank,
        {"device_class": "x"},
        "INVALID_ARGUMENT",
        "plain, clean, thin, sealed",
    ),
    "another group's class": (
        blank,
        {"device_class": "elsewhere"},
        "INVALID_ARGUMENT",
        "plain, clean, thin, sealed",
    ),
    "a class that encrypts": (
        formatted("data"),
        {"device_class": "sealed"},
        "FAILED_PRECONDITION",
        "name another --class",
    ),
    "another group": (blank, {"group": "other"}, "INVALID_ARGUMENT", "'other' is not allowed"),
}


@pytest.mark.parametrize("kind", chosen.kinds(REFUSED, usual=["encrypted"]))
def test_what_cannot_be_adopted_stays_as_it_is(
    client: Client, host: AnyHost, group: str, kind: str
) -> None:
    arrange, changed, code, word = REFUSED[kind]
    arrange(host, group)
    before = state(host, group)
    values: dict[str, object] = {"group": group, "name": "data", **changed}
    for dry_run in (True, False):
        with expect.code(code, word):
            client.adopt(asked(**values, dry_run=dry_run))  # type: ignore[arg-type]
    assert state(host, group) == before
    assert client.volumes() == []


@pytest.mark.long_on_lvm
def test_what_is_in_use_is_neither_adopted_nor_given_back(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    path = make(host, group, "data")
    host.write(path, "ext4")
    with mounted_at(host, path) as place, expect.code("FAILED_PRECONDITION", str(place)):
        client.adopt(asked(group, "data"))
    with host.kernel.opened(path), expect.code("FAILED_PRECONDITION", "has its device open"):
        client.adopt(asked(group, "data"))
    volume = client.adopt(asked(group, "data")).volume
    client.stage(volume, staging, mounted("ext4"))
    with expect.code("FAILED_PRECONDITION", "cannot undo", str(staging)):
        client.undo_adopt(asked(group, "data"))
    client.unstage(volume.volume_id, staging)
    taken = client.snapshot("monday", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", "snap-monday"):
        client.undo_adopt(asked(group, "data"))
    client.delete_snapshot(taken.snapshot_id)
    client.undo_adopt(asked(group, "data"))
    assert names(host, group) == {"data"}


@pytest.mark.variation
def test_an_undone_adoption_leaves_the_volume_as_it_was(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    host.write(make(host, group, f"pvc-{UID}", tags=CSI_DRIVER_LVM), "ext4")
    before = state(host, group)
    request = asked(group, f"pvc-{UID}", "csi-driver-lvm")
    volume = client.adopt(request).volume
    client.stage(volume, staging, mounted("ext4"))
    client.unstage(volume.volume_id, staging)
    adopted = state(host, group)

    planned = client.undo_adopt(asked(group, f"pvc-{UID}", dry_run=True))
    assert state(host, group) == adopted
    assert client.undo_adopt(asked(group, f"pvc-{UID}")) == planned
    assert state(host, group) == before
    assert list(client.undo_adopt(asked(group, f"pvc-{UID}")).changes) == []
    # Under its new name it can be named as well.
    client.adopt(request)
    client.undo_adopt(asked(group, f"vol-pvc-{UID}"))
    assert state(host, group) == before


@pytest.mark.variation
def test_what_carver_made_is_neither_adopted_nor_given_back(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    before = state(host, group)
    with expect.code("FAILED_PRECONDITION", "tags of Carver's already"):
        client.adopt(asked(group, "vol-pvc-1"))
    with expect.code("FAILED_PRECONDITION", "Carver made it"):
        client.undo_adopt(asked(group, "vol-pvc-1"))
    assert state(host, group) == before


@pytest.mark.variation
def test_a_name_that_is_taken_is_taken_by_no_other(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    host.write(make(host, group, "pvc-1"), "ext4")
    with expect.code("FAILED_PRECONDITION", "vol-pvc-1"):
        client.adopt(asked(group, "pvc-1"))
    client.delete(volume.volume_id)
    client.adopt(asked(group, "pvc-1"))
    make(host, group, "pvc-1")
    with expect.code("FAILED_PRECONDITION", "pvc-1 already"):
        client.undo_adopt(asked(group, "pvc-1"))


@pytest.mark.parametrize("undone", chosen.kinds([False, True], usual=[True]), ids=["adopt", "undo"])
@pytest.mark.parametrize("step", chosen.kinds([0, 1], usual=[1]))
def test_what_was_cut_off_goes_on_where_it_was(
    host: AnyHost, config: Config, group: str, undone: bool, step: int
) -> None:
    host.write(make(host, group, "data"), "ext4")
    request, before = asked(group, "data"), state(host, group)
    with served(host, config) as (_, client):
        volume = client.adopt(request).volume
        adopted = state(host, group)
        if not undone:
            client.undo_adopt(request)

    left = [step]

    def cut(words: Sequence[str]) -> Result | None:
        if words[:2] not in (("lvm", "lvchange"), ("lvm", "lvrename")):
            return None
        left[0] -= 1
        return Result(5, "", "killed") if left[0] < 0 else None

    with served(host, config) as (_, client):
        host.intercept = cut
        with expect.code("INTERNAL"):
            client.undo_adopt(request) if undone else client.adopt(request)
        host.intercept = lambda _words: None

    with served(host, config) as (_, client):
        # Half way it is no volume, whatever its tags say; and either call ends it.
        is_whole = undone and step == 0
        assert client.volumes() == ([volume] if is_whole else [])
        client.undo_adopt(request)
        assert state(host, group) == before
        assert client.adopt(request).volume == volume
        assert state(host, group) == adopted


@contextmanager
def nothing_happens(host: AnyHost, group: str) -> Iterator[None]:
    yield


@contextmanager
def grown(host: AnyHost, group: str) -> Iterator[None]:
    host.lvm("lvextend", "--size", f"{96 * MIB}b", "--", f"{group}/data")
    yield


@contextmanager
def formatted_anew(host: AnyHost, group: str) -> Iterator[None]:
    host.lvm("lvextend", "--size", f"{320 * MIB}b", "--", f"{group}/data")
    host.kernel.zero_out(device(host, group, "data"), 0, MIB)
    host.write(device(host, group, "data"), "xfs")
    yield


@contextmanager
def emptied(host: AnyHost, group: str) -> Iterator[None]:
    host.kernel.zero_out(device(host, group, "data"), 0, MIB)
    yield


@contextmanager
def snapshotted(host: AnyHost, group: str) -> Iterator[None]:
    volumes.create_snapshot(host.lvm, group, "mine", origin="data", size_bytes=8 * MIB, own_tags={})
    yield


@contextmanager
def opened(host: AnyHost, group: str) -> Iterator[None]:
    with host.kernel.opened(device(host, group, "data")):
        yield


@contextmanager
def taken_by_another(host: AnyHost, group: str) -> Iterator[None]:
    host.lvm("lvchange", "--addtag", CSI_DRIVER_LVM[1], "--", f"{group}/data")
    yield


# What the old user does between a call that was cut off and its repetition: the size and the file
# system that it then has, or a word of the refusal.
HAPPENED: dict[str, tuple[Callable[..., AbstractContextManager[None]], int, str]] = {
    "nothing": (nothing_happens, 64 * MIB, "ext4"),
    "grown": (grown, 96 * MIB, "ext4"),
    "formatted anew": (formatted_anew, 320 * MIB, "xfs"),
    "emptied": (emptied, 0, "no file system"),
    "snapshotted": (snapshotted, 0, "the snapshots mine"),
    "opened": (opened, 0, "has its device open"),
    "taken by another driver": (taken_by_another, 0, "--from csi-driver-lvm"),
}


@pytest.mark.parametrize("half", ["adopted", "undone", "not begun"])
@pytest.mark.parametrize("kind", HAPPENED)
@pytest.mark.variation
def test_what_has_not_its_new_name_is_looked_at_anew_by_each_call(
    client: Client, host: AnyHost, group: str, kind: str, half: str
) -> None:
    happens, size, word = HAPPENED[kind]
    host.write(make(host, group, "data"), "ext4")
    claim = {"pvc": "one", "namespace": "tenant-1"}
    if half == "undone":
        client.adopt(asked(group, "data", **claim))
    host.intercept = cut_off(after="lvchange" if half == "adopted" else "lvrename")
    if half != "not begun":
        with expect.code("INTERNAL"):
            if half == "adopted":
                client.adopt(asked(group, "data", **claim))
            else:
                client.undo_adopt(asked(group, "data"))
    host.intercept = lambda _words: None
    assert names(host, group) == {"data"}
    with happens(host, group):
        before = state(host, group)
        if not size:
            with expect.code("FAILED_PRECONDITION", word):
                client.adopt(asked(group, "data"))
            assert state(host, group) == before
            return
        volume = client.adopt(asked(group, "data", pvc="two")).volume
    own_tags = logical(host, group, "vol-data").own_tags
    assert (volume.capacity_bytes, own_tags["size"]) == (size, str(size))
    assert (own_tags["fsType"], own_tags["formatted"]) == (word, word)
    # Nothing of the call before.
    assert (own_tags["pvc"], own_tags.get("namespace")) == ("two", None)
    client.undo_adopt(asked(group, "data"))
    assert not logical(host, group, "data").own_tags


def cut_off(after: str) -> Callable[[Sequence[str]], Result | None]:
    """Fail each change after the first of that command."""
    done = [False]

    def cut(words: Sequence[str]) -> Result | None:
        if done[0] and words[:2] in (("lvm", "lvchange"), ("lvm", "lvrename")):
            return Result(5, "", "killed")
        done[0] = done[0] or words[:2] == ("lvm", after)
        return None

    return cut


# What another call says of the volume that was adopted, and a word of the refusal.
OTHERWISE: dict[str, tuple[dict[str, object], str, str]] = {
    "the same": ({}, "", ""),
    "no claim": ({"pvc": "", "namespace": ""}, "", ""),
    "its class": ({"device_class": "plain"}, "", ""),
    "another claim": ({"pvc": "two"}, "ALREADY_EXISTS", "pvc 'one', not 'two'"),
    "another tenant": ({"namespace": "tenant-2"}, "ALREADY_EXISTS", "tenant-2"),
    "another volume object": ({"pv": "pv-2"}, "ALREADY_EXISTS", "pv 'none'"),
    "another class": ({"device_class": "clean"}, "ALREADY_EXISTS", "clean"),
    "raw": ({"block": True}, "ALREADY_EXISTS", "access 'mount'"),
    "a driver": ({"made_by": "topolvm"}, "FAILED_PRECONDITION", "none of these drivers"),
}


@pytest.mark.parametrize("kind", OTHERWISE)
@pytest.mark.parametrize("by_new_name", [False, True])
@pytest.mark.variation
def test_an_adopted_volume_is_the_answer_to_who_asks_for_it_and_to_no_other(
    client: Client, host: AnyHost, group: str, kind: str, by_new_name: bool
) -> None:
    changed, code, word = OTHERWISE[kind]
    host.write(make(host, group, "data"), "ext4")
    claim: dict[str, str] = {"pvc": "one", "namespace": "tenant-1"}
    volume = client.adopt(asked(group, "data", **claim)).volume
    before = state(host, group)
    again: dict[str, object] = {"made_by": "", **claim, **changed}
    request = asked(group, "vol-data" if by_new_name else "data", **again)  # type: ignore[arg-type]
    if not code:
        assert client.adopt(request).volume == volume
    else:
        with expect.code(code, word):
            client.adopt(request)
    # Someone makes another of the old name: who asks for that gets neither.
    make(host, group, "data")
    others: list[dict[str, object]] = [{}, {**claim}, {"namespace": "tenant-2"}, {"block": True}]
    for more in others:
        with expect.code("FAILED_PRECONDITION", "adopted from another data", "lvrename"):
            client.adopt(asked(group, "data", **more))  # type: ignore[arg-type]
    host.lvm("lvremove", "--yes", "--", f"{group}/data")
    assert state(host, group) == before


@pytest.mark.variation
def test_an_adopted_volume_grows_by_zeroes_where_its_class_promises_them(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    host.mark_free(group, MARK)
    path = make(host, group, "data")
    for at in range(0, 64 * MIB, MIB):
        host.write_bytes(path, at, bytes(MIB))
    volume = client.adopt(asked(group, "data", block=True, device_class="clean")).volume
    client.stage(volume, staging, block())
    client.expand(volume.volume_id, 96 * MIB)
    path = device(host, group, "vol-data")
    assert not any(any(host.read_bytes(path, at, MIB)) for at in range(64 * MIB, 96 * MIB, MIB))


@pytest.mark.parametrize("own_kib", chosen.kinds([0, 4096], usual=[0]))
@pytest.mark.long_on_lvm
def test_an_undone_adoption_leaves_no_bound_of_carver_s_on_a_raid(
    host: AnyHost, config: Config, group: str, own_kib: int
) -> None:
    make(host, group, "data", "raid1")
    if own_kib:
        host.lvm("lvchange", "--maxrecoveryrate", str(own_kib), "--", f"{group}/data")
    before, request = logical(host, group, "data").tuning, asked(group, "data", block=True)
    bounded = replace(config, background_bandwidth=Reserve(size_bytes=2 * MIB))
    with served(host, bounded) as (service, client):
        client.adopt(request)
        in_background.resume(service)
        assert logical(host, group, "vol-data").tuning.bound_recovery_kib
        planned = client.undo_adopt(asked(group, "data", block=True, dry_run=True))
        assert len(planned.changes) == 3
        assert client.undo_adopt(request) == planned
        assert logical(host, group, "data").tuning == before
        assert not logical(host, group, "data").own_tags


@pytest.mark.variation
@pytest.mark.parametrize("undone", [False, True], ids=["adopt", "undo"])
def test_either_call_goes_on_from_half_way(
    host: AnyHost, config: Config, group: str, undone: bool
) -> None:
    host.write(make(host, group, "data"), "ext4")
    request, before = asked(group, "data"), state(host, group)
    with served(host, config) as (_, client):
        host.intercept = lambda words: (
            Result(5, "", "killed") if words[:2] == ("lvm", "lvrename") else None
        )
        with expect.code("INTERNAL"):
            client.adopt(request)
        host.intercept = lambda _words: None
        assert client.volumes() == []
        if undone:
            client.undo_adopt(request)
            assert state(host, group) == before
        else:
            assert len(client.adopt(request).changes) == 1
            assert names(host, group) == {"vol-data"}


@pytest.mark.variation
@pytest.mark.parametrize("kind", configured.LAYOUTS)
def test_each_layout_is_recognized(
    host: AnyHost, config: Config, kind: str, tmp_path: Path
) -> None:
    group = host.new_group(*[24] * configured.MOST_DISKS)
    classes = configured.classes(group, configured.layouts(kind), default=kind)
    with served(host, configured.carver(tmp_path, group, classes=classes)) as (_, client):
        client.create("a", 24 * MIB, block())
        made = logical(host, group, "vol-a")
        assert layout.recognize(made) == configured.LAYOUTS[kind]
