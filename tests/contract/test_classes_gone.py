"""A class leaves the configuration, or is another by now: what it made is served all the same."""

from dataclasses import replace

import expect
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, device, logical

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import block, mounted
from agent.operations import preflight
from lvm import report
from lvm.layout import Layout, Reserve
from lvm.thin import Policy

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
