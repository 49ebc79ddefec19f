"""A class leaves the configuration, or is another by now: what it made is served all the same."""

import errno
import os
from dataclasses import replace

import expect
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, device, logical

from agent.core import errors
from agent.csi.client import block, mounted, of_volume
from agent.operations import preflight
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from lvm.layout import Layout, Reserve
from lvm.thin import Policy
from proto import csi_pb2 as csi

# Carver's own record decides here; lvm2 is asked for nothing that other tests do not ask it for.
pytestmark = pytest.mark.variation

MIB = 1 << 20
EXTENT = 4 * MIB
FIRST = Policy(size=Reserve(size_bytes=4 * EXTENT))


def classes(group: str, other: str, how: str) -> tuple[DeviceClass, ...]:
    plain = DeviceClass("plain", group, default=True)
    thin = DeviceClass("thin", group, layout=Layout("thin"), pool=FIRST)
    now = {
        "same": [thin],
        "gone": [],
        "renamed": [replace(thin, name="slim")],
        "thick": [DeviceClass("thin", group)],
        "in another group": [replace(thin, group=other)],
    }
    return (plain, *now[how])


@pytest.mark.parametrize("how", ["same", "gone", "renamed", "thick", "in another group"])
def test_a_pool_grows_and_keeps_its_promise_whatever_its_class_is_now(
    host: AnyHost, group: str, config: Config, how: str
) -> None:
    other = host.new_group(30)
    before = replace(config, classes=classes(group, other, "same"))
    after = replace(config, classes=classes(group, other, how))
    service = serving.start(before, host)
    with Client(before.endpoint) as client:
        client.create("pvc-1", 40 * EXTENT, block(), parameters={"class": "thin"})
        room = client.capacity().available_capacity
    service.stop()
    service = serving.start(after, host)
    with Client(after.endpoint) as client:
        assert client.capacity().available_capacity == room
        path = device(host, group, "vol-pvc-1")
        for at in range(0, 4 * EXTENT - MIB // 2, MIB):
            host.write_bytes(path, at, b"contents" * (MIB // 8))
        assert service.autoextender.step(0)
        assert logical(host, group, "pool-thin").size_bytes > 4 * EXTENT
        found = preflight._of_no_class(service.node, report.read(host.lvm).group(group))
        named = [message for _, message, _ in found]
        assert [("thin" in one, "pool-thin" in one) for one in named] == [(True, True)] * (
            how != "same"
        )
    service.stop()


def test_a_volume_that_lost_its_key_file_with_its_class_says_so(
    host: AnyHost, group: str, config: Config
) -> None:
    key = host.directory / "key"
    key.write_bytes(b"correct horse battery staple")
    key.chmod(0o400)
    sealed = DeviceClass("sealed", group, encryption="luks2", key_file=key, default=True)
    staging = host.directory / "staging"
    service = serving.start(replace(config, classes=(sealed,)), host)
    with Client(config.endpoint) as client:
        volume = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    service.stop()
    service = serving.start(replace(config, classes=(replace(sealed, name="other"),)), host)
    with (
        Client(config.endpoint) as client,
        expect.code("INVALID_ARGUMENT", "no class 'sealed' any more"),
    ):
        client.stage(volume, staging)
    service.stop()


def test_a_copy_that_an_earlier_group_of_its_class_has_is_not_given_up(
    host: AnyHost, group: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = host.new_group(30)
    plain, spare = DeviceClass("plain", group, default=True), DeviceClass("spare", other)
    now = (replace(plain, group=other), replace(spare, group=group))

    def fails(*_words: object, **_more: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def copy(client: Client) -> csi.Volume:
        source = client.create("pvc-1", 16 * MIB, block())
        return client.create("copy", 16 * MIB, block(), source=of_volume(source.volume_id))

    with monkeypatch.context() as failing:
        failing.setattr(host.kernel, "copy", fails)
        for classes_then in ((plain, spare), now):
            service = serving.start(replace(config, classes=classes_then), host)
            aborted = expect.code("ABORTED", "Input/output error")
            with Client(config.endpoint) as client, aborted:
                copy(client)
            service.stop()
    service = serving.start(replace(config, classes=now), host)
    with Client(config.endpoint) as client:
        assert copy(client).volume_id.partition("@")[0] == group
    service.stop()


def test_an_earlier_group_of_a_class_is_looked_in_where_its_present_one_is_refused(
    host: AnyHost, group: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = host.new_group(30)
    plain, spare = DeviceClass("plain", group, default=True), DeviceClass("spare", other)
    service = serving.start(replace(config, classes=(plain, spare)), host)
    with Client(config.endpoint) as client:
        client.create("pvc-1", 16 * MIB, block())
    service.stop()
    now = (replace(plain, group=other), replace(spare, group=group))
    service = serving.start(replace(config, classes=now), host)
    refused = service.volume_groups.of(other)
    assert refused is not None

    def refuse() -> None:
        raise errors.GroupRefused(other, "another node's")

    with Client(config.endpoint) as client, monkeypatch.context() as refusing:
        refusing.setattr(refused, "_report", refuse)
        with expect.code("ABORTED", "another node's"):
            client.create("pvc-1", 16 * MIB, block())
        # Of this one nothing is there: another node may make it.
        with expect.code("RESOURCE_EXHAUSTED", "another node's"):
            client.create("pvc-2", 16 * MIB, block())
    service.stop()


def test_what_is_in_a_group_of_which_no_class_is_left_is_served_to_its_end(
    host: AnyHost, group: str, config: Config
) -> None:
    other = host.new_group(60)
    plain, spare = DeviceClass("plain", group, default=True), DeviceClass("spare", other)
    thin = DeviceClass("thin", other, layout=Layout("thin"), pool=FIRST)
    service = serving.start(replace(config, classes=(plain, spare, thin)), host)
    with Client(config.endpoint) as client:
        volume = client.create("pvc-1", 16 * MIB, parameters={"class": "spare"})
        in_pool = client.create("pvc-2", 16 * MIB, block(), parameters={"class": "thin"})
        mine = client.create("pvc-3", 16 * MIB, block())
        single = client.snapshot("1", volume.volume_id)
        sources = [one.volume_id for one in (volume, in_pool, mine)]
        taken = client.group_snapshot("nightly", sources)
    service.stop()
    service = serving.start(replace(config, classes=(plain,)), host, eraser=600)
    members = [one.snapshot_id for one in taken.snapshots]
    with Client(config.endpoint) as client:
        client.stage(volume, host.directory / "staging")
        client.unstage(volume.volume_id, host.directory / "staging")
        client.expand(in_pool.volume_id, 32 * MIB)
        health = csi.ControllerGetVolumeHealthRequest(volume_id=volume.volume_id)
        assert not client.controller.ControllerGetVolumeHealth(health).volume_health.health_statuses
        # By their ids, as sidecars ask, and by their names, as they repeat a call.
        assert client.snapshot("1", volume.volume_id) == single
        assert single in client.snapshots(volume_id=volume.volume_id)
        assert client.group_snapshot("nightly", sources) == taken
        assert client.find_group_snapshot(taken.group_snapshot_id, members) == taken
        client.delete_group_snapshot(taken.group_snapshot_id, members)
        with expect.code("NOT_FOUND"):
            client.find_group_snapshot(taken.group_snapshot_id, members)
        client.delete_snapshot(single.snapshot_id)
        for one in sources:
            client.delete(one)
    assert not report.read(host.lvm).group(other).volumes
    service.stop()
