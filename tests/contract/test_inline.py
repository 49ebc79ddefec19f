"""Inline volumes: made by publishing, gone with unpublishing, and what lies between."""

import errno
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import grpc
import pytest
import serving
from csi_client import Client
from real.any import AnyHost

from agent.csi.client import Mode, block, mounted
from agent.daemon.server import Service
from agent.operations.inline import InlineVolumes
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from lvm.layout import Layout, Reserve
from lvm.report import LogicalVolume
from lvm.room import Room
from lvm.thin import Policy
from mount import table
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
# As kubelet makes it: csi- and a SHA-256.
VOLUME = f"csi-{'0123456789abcdef' * 4}"
SMALL = {"size": "64Mi"}


@pytest.fixture
def config(host: AnyHost, group: str, tmp_path: Path) -> Config:
    """Kubelet's directory is the host's own, so that the directory of all pods lies in it."""
    classes = (
        DeviceClass(name="plain", group=group, default=True),
        DeviceClass(name="thin", group=group, layout=Layout("thin"), pool=Policy()),
        DeviceClass(name="striped", group=group, layout=Layout("striped", stripes=2)),
    )
    directory = str(host.directory)
    return configured.carver(tmp_path, group, kubelet_dir=(directory,), classes=classes)


@pytest.fixture
def target(host: AnyHost) -> Path:
    """Where kubelet wants a volume of a pod; it makes the directory above."""
    directory = host.directory / "pods" / "17" / "volumes"
    directory.mkdir(parents=True)
    return directory / "mount"


def volumes(host: AnyHost, group: str) -> list[LogicalVolume]:
    return list(report.read(host.lvm).group(group).volumes.values())


def programs(host: AnyHost, action: Callable[[], object]) -> list[tuple[str, ...]]:
    before = len(host.commands)
    action()
    return host.commands[before:]


def test_publish_makes_formats_and_mounts_a_volume(
    client: Client, host: AnyHost, group: str, target: Path
) -> None:
    client.publish_inline(VOLUME, target, {"size": "320Mi", "carver/fsType": "xfs"})

    [mount] = table.read(host.kernel).at(str(target))
    assert (mount.fs_type, mount.root, mount.read_only) == ("xfs", "/", False)
    [volume] = volumes(host, group)
    assert volume.size_bytes == 320 * MIB
    expected = {
        "name": VOLUME,
        "ephemeral": "true",
        "target": str(target),
        "pod": "web-0",
        "namespace": "shop",
        "podUid": "17",
    }
    assert expected.items() <= volume.own_tags.items()
    assert client.stats(VOLUME, target).usage[0].total > 200 * MIB


def test_unpublish_erases_it(client: Client, host: AnyHost, group: str, target: Path) -> None:
    free = client.capacity().available_capacity
    client.publish_inline(VOLUME, target, SMALL)
    for _ in range(2):
        client.unpublish(VOLUME, target)
        assert volumes(host, group) == []
        assert not target.exists()
    assert client.capacity().available_capacity == free


@pytest.mark.variation
def test_layout_parameters(client: Client, host: AnyHost, group: str, target: Path) -> None:
    asked = {**SMALL, "class": "striped", "carver/stripeSize": "8KiB"}
    client.publish_inline(VOLUME, target, asked)
    [volume] = volumes(host, group)
    layout = Layout.parse(volume.own_tags["layout"])
    assert layout == Layout("striped", stripes=2, stripe_size_bytes=8192)
    client.publish_inline(VOLUME, target, asked)
    with expect.code("INVALID_ARGUMENT", "stripes"):
        client.publish_inline("csi-other", target, {**SMALL, "stripes": "2"})


@pytest.mark.variation
def test_thin_one_is_deleted_with_its_pool(
    client: Client, host: AnyHost, group: str, target: Path
) -> None:
    client.publish_inline(VOLUME, target, {**SMALL, "class": "thin"})
    assert len(table.read(host.kernel).at(str(target))) == 1
    client.unpublish(VOLUME, target)
    assert volumes(host, group) == []


@pytest.mark.variation
def test_publish_twice_runs_no_command(client: Client, host: AnyHost, target: Path) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    before = table.read(host.kernel).under(str(host.directory))
    assert programs(host, lambda: client.publish_inline(VOLUME, target, SMALL)) == []
    assert table.read(host.kernel).under(str(host.directory)) == before


def test_data_survive_a_reboot(client: Client, host: AnyHost, group: str, target: Path) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    [volume] = volumes(host, group)
    host.kernel.unmount(str(target))
    host.deactivate(group, volume.name)

    said = programs(host, lambda: client.publish_inline(VOLUME, target, SMALL))

    assert table.read(host.kernel).at(str(target))
    assert not [words for words in said if words[0].startswith("mkfs")]
    client.unpublish(VOLUME, target)
    assert volumes(host, group) == []


def test_unpublish_of_inactive_one(client: Client, host: AnyHost, group: str, target: Path) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    [volume] = volumes(host, group)
    host.kernel.unmount(str(target))
    host.deactivate(group, volume.name)
    client.unpublish(VOLUME, target)
    assert volumes(host, group) == []


@pytest.mark.variation
def test_read_only(client: Client, host: AnyHost, target: Path) -> None:
    client.publish_inline(VOLUME, target, SMALL, read_only=True)
    [mount] = table.read(host.kernel).at(str(target))
    assert mount.read_only
    client.publish_inline(VOLUME, target, SMALL, read_only=True)
    with expect.code("ALREADY_EXISTS"):
        client.publish_inline(VOLUME, target, SMALL)


@pytest.mark.variation
def test_second_target_is_refused(client: Client, host: AnyHost, group: str, target: Path) -> None:
    capability = mounted("ext4", mode=Mode.SINGLE_NODE_MULTI_WRITER)
    client.publish_inline(VOLUME, target, SMALL, capability)
    other = target.with_name("other")
    with expect.code("FAILED_PRECONDITION", "one target", str(target)):
        client.publish_inline(VOLUME, other, SMALL, capability)
    assert not other.exists()
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.unpublish(VOLUME, other)
    assert len(volumes(host, group)) == 1


@pytest.mark.variation
def test_bind_mount_elsewhere_is_no_second_target(
    client: Client, host: AnyHost, target: Path, tmp_path: Path
) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    twin = tmp_path / "twin"
    twin.mkdir()
    host.kernel.bind(str(target), str(twin), set())
    client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(twin))
    client.unpublish(VOLUME, target)


@pytest.mark.parametrize(
    ("attributes", "code", "word"),
    [
        ({"size": "huge"}, "INVALID_ARGUMENT", "huge"),
        ({"size": "0"}, "INVALID_ARGUMENT", "larger than 0"),
        ({"size": "1Mi", "carver/size": "2Mi"}, "INVALID_ARGUMENT", "prefix"),
        ({"size": "500Gi"}, "RESOURCE_EXHAUSTED", "has room for"),
        # The default size, which is more than the group has.
        ({}, "RESOURCE_EXHAUSTED", str(1 << 30)),
        ({"class": "none"}, "INVALID_ARGUMENT", "plain"),
        ({"sise": "1Gi"}, "INVALID_ARGUMENT", "carver/size"),
        ({"fsType": "ntfs"}, "INVALID_ARGUMENT", "ext4"),
        ({"fsType": "xfs", "mkfsOptions": "-f"}, "INVALID_ARGUMENT", "-f"),
        ({"mountOptions": "errors=panic"}, "INVALID_ARGUMENT", "errors=panic"),
    ],
    ids=str,
)
@pytest.mark.variation
def test_wrong_parameters_are_refused(
    client: Client,
    host: AnyHost,
    group: str,
    target: Path,
    attributes: dict[str, str],
    code: str,
    word: str,
) -> None:
    with expect.code(code, word):
        client.publish_inline(VOLUME, target, attributes)
    assert volumes(host, group) == []
    assert not target.exists()


@pytest.mark.variation
def test_invalid_requests_are_refused(client: Client, target: Path) -> None:
    request = csi.NodePublishVolumeRequest(
        volume_id=VOLUME,
        target_path=str(target),
        volume_capability=mounted(),
        volume_context={"csi.storage.k8s.io/ephemeral": "perhaps"},
    )
    with expect.code("INVALID_ARGUMENT", "perhaps", "true"):
        client.node.NodePublishVolume(request)
    with expect.code("INVALID_ARGUMENT", "never block"):
        client.publish_inline(VOLUME, target, SMALL, block())
    for volume_id in ("", "x" * 129, "a\x01b", "data@3kXq0b9Z/vol-pvc-1"):
        with expect.code("INVALID_ARGUMENT", "volume_id"):
            client.publish_inline(volume_id, target, SMALL)


@pytest.mark.variation
def test_controller_does_not_know_it(
    client: Client, host: AnyHost, group: str, target: Path
) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    uuid = report.read(host.lvm).group(group).uuid.replace("-", "")[:8]
    logical_id = f"{group}@{uuid}/{volumes(host, group)[0].name}"
    assert client.volumes() == []
    for volume_id in (VOLUME, logical_id):
        with expect.code("NOT_FOUND"):
            client.volume(volume_id)
        with expect.code("NOT_FOUND"):
            client.stage(csi.Volume(volume_id=volume_id), target.with_name("staging"))
        with expect.code("NOT_FOUND"):
            client.publish(csi.Volume(volume_id=volume_id), target, target.with_name("second"))
    client.delete(VOLUME)
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.delete(logical_id)
    assert len(volumes(host, group)) == 1
    # An operator may delete one that is no longer used.
    host.kernel.unmount(str(target))
    client.delete(logical_id)
    assert volumes(host, group) == []


@pytest.mark.variation
def test_unpublish_fails_while_a_group_is_missing(
    host: AnyHost, client: Client, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(target))
    monkeypatch.setattr(host.disks, "scan", lambda *_seconds: {})
    monkeypatch.setattr(host.disks, "fingerprint", lambda *_asked: None)
    for name in (VOLUME, "csi-another"):
        with expect.code("FAILED_PRECONDITION", "is not on this node"):
            client.unpublish(name, target)


@pytest.mark.variation
def test_foreign_mount_is_kept(client: Client, host: AnyHost, group: str, target: Path) -> None:
    other = "csi-other"
    client.publish_inline(other, target, SMALL)
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish_inline(VOLUME, target, SMALL)
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.unpublish(VOLUME, target)
    client.unpublish(other, target)
    client.unpublish(VOLUME, target)
    assert volumes(host, group) == []


# What a pod that is gone left


def forgotten(host: AnyHost, client: Client, target: Path) -> None:
    """The pod's directory is removed, and the volume never unpublished."""
    client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(target))
    for path in (target, target.parent, target.parent.parent):
        path.rmdir()


@pytest.mark.variation
def test_second_sweep_removes_a_volume_without_pod(
    client: Client, host: AnyHost, service: Service, group: str, target: Path
) -> None:
    forgotten(host, client, target)
    service.inline_volumes.sweep(group)
    assert len(volumes(host, group)) == 1
    service.inline_volumes.sweep(group)
    assert volumes(host, group) == []
    assert programs(host, lambda: service.inline_volumes.sweep(group)) != []
    assert programs(host, lambda: service.inline_volumes.sweep(group)) == []


@pytest.mark.variation
def test_pod_that_came_back_keeps_its_volume(
    client: Client, host: AnyHost, service: Service, group: str, target: Path
) -> None:
    forgotten(host, client, target)
    service.inline_volumes.sweep(group)
    target.parent.mkdir(parents=True)
    service.inline_volumes.sweep(group)
    (target.parent).rmdir()
    (target.parent.parent).rmdir()
    service.inline_volumes.sweep(group)
    # Without the directory of all pods, that of a pod proves nothing.
    (host.directory / "pods").rmdir()
    for _ in range(2):
        service.inline_volumes.sweep(group)
    assert len(volumes(host, group)) == 1


@pytest.mark.variation
def test_pod_that_exists_keeps_its_volume(
    client: Client, host: AnyHost, service: Service, group: str, target: Path
) -> None:
    """Kubelet removes a target and the directory it is in after each failure; not the pod's."""
    client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(target))
    target.rmdir()
    target.parent.rmdir()
    for _ in range(3):
        service.inline_volumes.sweep(group)
    assert len(volumes(host, group)) == 1
    target.parent.parent.rmdir()


@pytest.mark.variation
def test_inactive_and_other_volumes_are_kept(
    client: Client, host: AnyHost, service: Service, group: str, target: Path
) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(target))
    host.deactivate(group, volumes(host, group)[0].name)
    client.create("pvc-1", 16 * MIB)
    for _ in range(2):
        service.inline_volumes.sweep(group)
    assert len(volumes(host, group)) == 2


@pytest.mark.variation
def test_failed_sweep_is_logged_and_retried(
    host: AnyHost,
    group: str,
    config: Config,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.operations.inline._TURN_SECONDS", 0.001)
    running = Service(config, serving.machine(host), host.lvm)
    host.intercept = lambda words: Result(5, "", "no") if words[0] == "lvm" else None
    running.start(config.endpoint)
    expect.soon(lambda: "are not removed" in caplog.text)
    assert running.inline_volumes.scans.is_alive
    running.stop()
    expect.soon(lambda: not running.inline_volumes.scans.is_alive)
    host.intercept = lambda _words: None
    # It looks again, though none was known of.
    assert programs(host, lambda: running.inline_volumes.sweep(group)) != []
    assert programs(host, lambda: running.inline_volumes.sweep(group)) == []


@pytest.mark.variation
def test_sweeps_are_repeated(
    host: AnyHost, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.operations.inline._TURN_SECONDS", 0.001)
    sweeps, enough = itertools.count(1), threading.Event()

    def sweep(_: InlineVolumes, group: str) -> bool:
        if next(sweeps) == 3:
            enough.set()
        return False

    monkeypatch.setattr(InlineVolumes, "sweep", sweep)
    running = Service(config, serving.machine(host), host.lvm)
    running.start(config.endpoint)
    assert enough.wait(expect.PATIENCE_SECONDS)
    running.stop()


# A call that fails for good, after which kubelet forgets the volume


def refuse(*_: object) -> None:
    """In place of a system call."""
    raise OSError(errno.EINVAL, "no luck")


@pytest.mark.parametrize("kind", chosen.kinds(["plain", "thin"], usual=["plain"]))
@pytest.mark.variation
def test_failed_mkfs_leaves_no_volume(
    client: Client, host: AnyHost, group: str, target: Path, kind: str
) -> None:
    host.intercept = lambda words: Result(1, "", "no luck") if words[0] == "mkfs.ext4" else None
    with expect.code("INTERNAL", "no luck"):
        client.publish_inline(VOLUME, target, {**SMALL, "class": kind})
    host.intercept = lambda _words: None
    assert [one.name for one in volumes(host, group) if one.name.startswith("eph")] == []
    client.publish_inline(VOLUME, target, {**SMALL, "class": kind})
    client.unpublish(VOLUME, target)


@pytest.mark.variation
@pytest.mark.parametrize("operation", ["mount", "signatures"])
def test_failed_mount_leaves_no_volume(
    client: Client,
    host: AnyHost,
    group: str,
    target: Path,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host.kernel, operation, refuse)
    with expect.code("INTERNAL", "no luck"):
        client.publish_inline(VOLUME, target, SMALL)
    assert volumes(host, group) == []


@pytest.mark.variation
def test_running_mkfs_keeps_the_volume(
    client: Client,
    config: Config,
    host: AnyHost,
    group: str,
    target: Path,
    mkfs_fails: threading.Event,
    real: bool,
) -> None:
    with (
        Client(config.endpoint, timeout_seconds=5 if real else 2) as impatient,
        expect.code("ABORTED", "mkfs"),
    ):
        impatient.publish_inline(VOLUME, target, SMALL)
    assert len(volumes(host, group)) == 1
    mkfs_fails.set()
    # It was made by another call, but never held anything.
    with expect.code("INTERNAL", "no luck"):
        client.publish_inline(VOLUME, target, SMALL)
    assert volumes(host, group) == []
    client.publish_inline(VOLUME, target, SMALL)


@pytest.mark.variation
def test_volume_with_data_is_kept_after_a_failure(
    client: Client, host: AnyHost, group: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(target))
    with monkeypatch.context() as patch:
        patch.setattr(host.kernel, "superblock", refuse)
        with expect.code("INTERNAL", "no luck"):
            client.publish_inline(VOLUME, target, SMALL)
    assert len(volumes(host, group)) == 1
    client.publish_inline(VOLUME, target, SMALL)


@pytest.mark.variation
def test_failed_cleanup_is_logged(
    client: Client, host: AnyHost, group: str, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()

    def intercept(words: Sequence[str]) -> Result | None:
        if words[0] == "mkfs.ext4":
            broken.set()
            return Result(1, "", "no luck")
        return Result(5, "", "lvm2 has none either") if broken.is_set() else None

    host.intercept = intercept
    with expect.code("INTERNAL", "no luck"):
        client.publish_inline(VOLUME, target, SMALL)
    host.intercept = lambda _words: None
    assert "cannot delete inline volume" in caplog.text
    client.unpublish(VOLUME, target)
    assert volumes(host, group) == []


# How much of a node they may take


@pytest.fixture
def limited(host: AnyHost, config: Config) -> Iterator[Client]:
    """A node that allows 64 MiB for each, and 160 MiB for all."""
    config = replace(
        config, inline_volume_limit=64 * MIB, inline_total_limit=Reserve(size_bytes=160 * MIB)
    )
    running = Service(config, serving.machine(host), host.lvm)
    running.eraser.grace_seconds = 600
    running.start(config.endpoint)
    with Client(config.endpoint) as caller:
        yield caller
    running.stop()


@pytest.mark.variation
def test_volume_limit(limited: Client, host: AnyHost, group: str, target: Path) -> None:
    for asked in ({"size": "65Mi"}, {}):
        with expect.code("INVALID_ARGUMENT", "size", "inline_volume_limit", str(64 * MIB)):
            limited.publish_inline(VOLUME, target, asked)
    assert volumes(host, group) == []
    assert not target.exists()
    limited.publish_inline(VOLUME, target, SMALL)


def test_total_limit_holds_for_concurrent_calls(
    limited: Client, host: AnyHost, group: str, target: Path
) -> None:
    def publish(number: int) -> str:
        try:
            limited.publish_inline(f"csi-{number}", target.with_name(f"mount-{number}"), SMALL)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(publish, range(5)))
    refused = [one for one in answers if one != "OK"]
    assert len(volumes(host, group)) == 5 - len(refused) == 2
    for one in refused:
        assert one.startswith("RESOURCE_EXHAUSTED")
        assert f"inline_total_limit is {160 * MIB} bytes" in one
    # A repeated call counts once, and a deleted volume makes room.
    number = answers.index("OK")
    limited.publish_inline(f"csi-{number}", target.with_name(f"mount-{number}"), SMALL)
    limited.unpublish(f"csi-{number}", target.with_name(f"mount-{number}"))
    limited.publish_inline("csi-9", target.with_name("mount-9"), SMALL)


@pytest.mark.variation
def test_lowered_limits_keep_existing_volumes(
    client: Client, host: AnyHost, config: Config, tmp_path: Path, target: Path
) -> None:
    client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(target))
    config = replace(
        config,
        endpoint=tmp_path / "second.sock",
        inline_volume_limit=MIB,
        inline_total_limit=Reserve(percent=1),
    )
    running = Service(config, serving.machine(host), host.lvm)
    running.start(config.endpoint)
    with Client(config.endpoint) as caller:
        caller.publish_inline(VOLUME, target, SMALL)
        with expect.code("INVALID_ARGUMENT", "inline_volume_limit"):
            caller.publish_inline("csi-other", target.with_name("other"), SMALL)
        with expect.code("RESOURCE_EXHAUSTED", "inline_total_limit"):
            caller.publish_inline("csi-other", target.with_name("other"), {"size": "1Mi"})
    running.stop()


LAYOUTS = {
    "linear": Layout(),
    "striped": Layout("striped", stripes=2),
    "raid1": Layout("raid1", mirrors=1),
    "raid5": Layout("raid5", stripes=2),
    "raid6": Layout("raid6", stripes=3),
    "raid10": Layout("raid10", stripes=2, mirrors=1),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.variation
def test_the_total_limit_counts_what_a_layout_takes_of_the_group(
    kind: str, host: AnyHost, tmp_path: Path, target: Path
) -> None:
    group = host.new_group(*[100] * 5)
    safe = DeviceClass(name="safe", group=group, default=True, layout=LAYOUTS[kind])
    directory = str(host.directory)
    made = configured.carver(tmp_path, group, kubelet_dir=(directory,), classes=(safe,))
    config = replace(made, inline_volume_limit=0, inline_total_limit=Reserve(percent=50))
    running = Service(config, serving.machine(host), host.lvm)
    running.start(config.endpoint)
    empty = Room(report.read(host.lvm).group(group)).free_extents
    with (
        Client(config.endpoint) as client,
        expect.code("RESOURCE_EXHAUSTED", "inline_total_limit"),
    ):
        for count in itertools.count():
            place = target.with_name(f"mount-{count}")
            client.publish_inline(f"csi-{count}", place, {"size": "32Mi"})
    running.stop()
    known = report.read(host.lvm).group(group)
    used = empty - Room(known).free_extents
    # What one more would have taken is more than what the limit leaves.
    assert used <= Room(known).extents // 2 < used + used // count
    for number in range(count):
        host.kernel.unmount(str(target.with_name(f"mount-{number}")))


@pytest.mark.variation
@pytest.mark.parametrize("fails", ["fsck.ext4", "mount"])
def test_volume_with_data_is_kept_where_a_killed_process_did_not_record_its_file_system(
    config: Config,
    host: AnyHost,
    group: str,
    target: Path,
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(words: Sequence[str]) -> Result | None:
        is_refused = "carver.formatted=ext4" in words and "--addtag" in words
        return Result(5, "", "no free space in the metadata") if is_refused else None

    host.intercept = full
    with serving.served(host, config) as (_, client):
        client.publish_inline(VOLUME, target, SMALL)
    host.kernel.unmount(str(target))
    damaged = Result(4, "", "damage is left")
    host.intercept = lambda words: damaged if words[0] == fails else full(words)
    with serving.served(host, config) as (_, client), monkeypatch.context() as patch:
        if fails == "mount":
            patch.setattr(host.kernel, "mount", refuse)
        with pytest.raises(grpc.RpcError):
            client.publish_inline(VOLUME, target, SMALL)
        assert [one.name[:4] for one in volumes(host, group)] == ["eph."]
    host.intercept = lambda _words: None
    with serving.served(host, config) as (_, client):
        client.publish_inline(VOLUME, target, SMALL)
        client.unpublish(VOLUME, target)
        assert volumes(host, group) == []
