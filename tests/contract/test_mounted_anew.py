"""File systems that met an error, and pods that follow each other: what a publish mends."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import chosen
import expect
import grpc
import pytest
from csi_client import Client
from model.stopping import Switch
from nodes import Node
from real.any import AnyHost

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Mode, mounted
from lvm import report, tags
from mount import table
from mount.table import Mount

MIB = 1 << 20
ENDS, GOES_ON = ["errors=remount-ro", "noatime"], ["noatime"]
KEY = {"passphrase": "correct horse"}


@pytest.fixture
def config(config: Config, group: str) -> Config:
    every = (
        DeviceClass("plain", group, default=True),
        DeviceClass("secret", group, encryption="luks2"),
    )
    return Config(**{**vars(config), "classes": every})


class Shop:
    """A volume that is staged, and its pods."""

    def __init__(
        self, client: Client, host: AnyHost, group: str, flags: list[str], name: str = "plain"
    ) -> None:
        self.client, self.host, self.group = client, host, group
        self.how = mounted("ext4", flags, mode=Mode.SINGLE_NODE_MULTI_WRITER)
        self.volume = client.create("pvc-1", 48 * MIB, self.how, parameters={"class": name})
        self.staging = host.directory / "staging"
        self.client.stage(self.volume, self.staging, self.how, KEY if name == "secret" else {})

    def publish(self, pod: str) -> None:
        self.client.publish(self.volume, self.staging, self.host.directory / pod, self.how)

    def unpublish(self, pod: str) -> None:
        self.client.unpublish(self.volume.volume_id, self.host.directory / pod)

    def unstage(self) -> None:
        self.client.unstage(self.volume.volume_id, self.staging)

    def mount(self) -> Mount:
        [found] = table.read(self.host.kernel).at(str(self.staging))
        return found

    def fail(self) -> None:
        self.host.break_file_system(self.mount().source)

    def reasons(self) -> list[str]:
        told = self.client.node_health(self.volume.volume_id).health_statuses
        return [one.reason for one in told]

    def own_tags(self) -> dict[str, str]:
        found = report.read(self.host.lvm).group(self.group).volume("vol-pvc-1")
        return dict(tags.decode(found.tags))


@pytest.mark.parametrize("name", chosen.kinds(["plain", "secret"], usual=["secret"]))
@pytest.mark.parametrize("flags", [ENDS, GOES_ON], ids=["turns read-only", "goes on"])
def test_the_pod_that_comes_next_has_a_file_system_that_was_checked(
    client: Client, host: AnyHost, group: str, name: str, flags: list[str]
) -> None:
    """Kubelet keeps it staged: the next pod came before it was unstaged."""
    shop = Shop(client, host, group, flags, name)
    shop.publish("a")
    shop.fail()
    assert "FileSystemErrors" in shop.reasons()
    shop.unpublish("a")
    shop.publish("b")
    assert shop.reasons() == []
    assert not shop.mount().read_only
    assert "noatime" in shop.mount().options
    assert "remount" not in shop.own_tags()
    shop.unpublish("b")
    shop.unstage()


def test_while_another_pod_has_it_nothing_is_taken_away(
    client: Client, host: AnyHost, group: str
) -> None:
    shop = Shop(client, host, group, ENDS)
    shop.publish("a")
    shop.fail()
    before = shop.mount()
    if before.read_only:
        with expect.code("FAILED_PRECONDITION", "is read-only", "scale what uses it to 0"):
            shop.publish("b")
    else:  # Linux 6.12, and stable kernels of its time, tell it by the count alone
        shop.publish("b")
        shop.unpublish("b")
    assert shop.mount() == before
    shop.unpublish("a")
    shop.publish("b")
    assert shop.reasons() == []


@pytest.mark.variation
def test_what_goes_on_after_an_error_is_published_to_others_beside(
    client: Client, host: AnyHost, group: str
) -> None:
    shop = Shop(client, host, group, GOES_ON)
    shop.publish("a")
    shop.fail()
    shop.publish("b")
    assert shop.reasons() == ["FileSystemErrors"]


@pytest.mark.variation
def test_what_is_lost_is_never_formatted_again(client: Client, host: AnyHost, group: str) -> None:
    shop = Shop(client, host, group, ENDS)
    shop.fail()
    source = shop.mount().source
    host.kernel.unmount(str(shop.staging))
    host.lvm("lvchange", "--addtag", "carver.remount=yes", "--", f"{group}/vol-pvc-1")
    host.lvm("lvchange", "--deltag", "carver.formatted=ext4", "--", f"{group}/vol-pvc-1")
    host.erase(source)
    with expect.code("FAILED_PRECONDITION"):
        shop.publish("a")
    assert not table.read(host.kernel).at(str(shop.staging))


def test_what_is_not_staged_is_not_published(client: Client, host: AnyHost, group: str) -> None:
    shop = Shop(client, host, group, ENDS)
    shop.fail()
    shop.unstage()
    with expect.code("FAILED_PRECONDITION", "is not staged"):
        shop.publish("a")


@pytest.mark.variation
def test_one_that_was_unstaged_in_the_midst_of_it_is_not_mounted_by_a_publish_that_comes_late(
    client: Client, host: AnyHost, group: str
) -> None:
    shop = Shop(client, host, group, ENDS)
    host.kernel.unmount(str(shop.staging))
    host.lvm("lvchange", "--addtag", "carver.remount=yes", "--", f"{group}/vol-pvc-1")
    client.volumes()
    shop.unstage()
    assert "remount" not in shop.own_tags()
    with expect.code("FAILED_PRECONDITION", "is not staged"):
        shop.publish("a")


@pytest.fixture
def node(host: AnyHost, config: Config, group: str, tmp_path: Path) -> Iterator[Node]:
    """A service that can be killed."""
    made = Node(host, config, group, tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.mark.variation
def test_one_that_was_killed_at_any_step_is_mounted_anew_by_the_next_call(
    node: Node, host: AnyHost, group: str
) -> None:
    taken, stop_at = 1, -1
    while stop_at < taken:
        for before in (True, False):
            shop = Shop(node.client, host, group, ENDS)
            shop.publish("a")
            shop.fail()
            shop.unpublish("a")
            switch = Switch(stop_at, before=before)
            node.restart(switch)
            shop.client = node.client
            with suppress(grpc.RpcError):
                shop.publish("b")
            if stop_at < 0:
                taken = len(switch.taken)
            else:
                assert switch.dead.wait(10)
                node.kill()
                shop.client = node.client
                shop.publish("b")
            assert shop.reasons() == [], (stop_at, before)
            assert not shop.mount().read_only, (stop_at, before)
            shop.unpublish("b")
            shop.unstage()
            assert "remount" not in shop.own_tags()
            shop.client.delete(shop.volume.volume_id)
        stop_at += 1
    assert taken > 5
