"""A publish, and a repeated stage, check and mount again a file system that met an error."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import grpc
import pytest
from csi_client import Client
from model.stopping import Switch, stops
from nodes import Node
from real.any import AnyHost
from use import Use

from agent.csi.client import Mode, mounted
from agent.settings.settings import Config
from lvm import report
from mount import table
from mount.table import Mount

MIB = 1 << 20
ENDS, GOES_ON = ["errors=remount-ro", "noatime"], ["noatime"]
KEY = {"passphrase": "correct horse"}
pytestmark = pytest.mark.settings(
    classes=(configured.PLAIN, replace(configured.SEALED, name="secret"))
)


class Shop(Use):
    """A volume that is staged, and its pods."""

    def __init__(
        self, client: Client, host: AnyHost, group: str, flags: list[str], name: str = "plain"
    ) -> None:
        how = mounted("ext4", flags, mode=Mode.SINGLE_NODE_MULTI_WRITER)
        volume = client.create("pvc-1", 48 * MIB, how, parameters={"class": name})
        super().__init__(client, host.directory, volume, how)
        self.host, self.group = host, group
        self.stage(KEY if name == "secret" else {})

    def mount(self) -> Mount:
        [found] = table.read(self.host.kernel).at(str(self.staging))
        return found

    def fail(self) -> None:
        self.host.break_file_system(self.mount().source)

    def own_tags(self) -> dict[str, str]:
        found = report.read(self.host.lvm).group(self.group).volume("vol-pvc-1")
        return dict(found.own_tags)


@pytest.mark.parametrize("name", chosen.kinds(["plain", "secret"], usual=["secret"]))
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(ENDS, id="turns read-only"),
        pytest.param(GOES_ON, id="goes on", marks=pytest.mark.variation),
    ],
)
def test_the_next_pod_has_a_checked_file_system(
    client: Client, host: AnyHost, group: str, name: str, flags: list[str]
) -> None:
    """Kubelet keeps it staged if the next pod comes soon enough."""
    shop = Shop(client, host, group, flags, name)
    shop.publish("a")
    shop.fail()
    assert "FileSystemErrors" in shop.reasons()
    shop.unpublish("a")
    shop.publish("b")
    assert shop.reasons() == set()
    assert not shop.mount().read_only
    assert "noatime" in shop.mount().options
    assert "remount" not in shop.own_tags()
    shop.unpublish("b")
    shop.unstage()


def test_a_stage_of_what_is_staged_checks_it_too(client: Client, host: AnyHost, group: str) -> None:
    """Kubelet stages each volume anew after its own start, and publishes none that it cannot."""
    shop = Shop(client, host, group, ENDS)
    shop.publish("a")
    shop.fail()
    shop.unpublish("a")
    shop.stage()
    assert shop.reasons() == set()
    assert not shop.mount().read_only
    assert "remount" not in shop.own_tags()
    shop.publish("b")
    shop.unpublish("b")
    shop.unstage()


def test_a_file_system_in_use_by_another_pod_stays_mounted(
    client: Client, host: AnyHost, group: str
) -> None:
    shop = Shop(client, host, group, ENDS)
    shop.publish("a")
    shop.fail()
    before = shop.mount()
    if before.read_only:
        with expect.code("FAILED_PRECONDITION", "is read-only", "scale what uses it to 0"):
            shop.publish("b")
    else:  # Linux 6.12, and stable kernels of its time, report it by the count alone
        shop.publish("b")
        shop.unpublish("b")
    assert shop.mount() == before
    shop.unpublish("a")
    shop.publish("b")
    assert shop.reasons() == set()


@pytest.mark.variation
def test_a_file_system_that_continues_on_errors_is_published_to_more_pods(
    client: Client, host: AnyHost, group: str
) -> None:
    shop = Shop(client, host, group, GOES_ON)
    shop.publish("a")
    shop.fail()
    shop.publish("b")
    assert shop.reasons() == {"FileSystemErrors"}


@pytest.mark.variation
def test_lost_contents_are_never_formatted_again(client: Client, host: AnyHost, group: str) -> None:
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


@pytest.mark.variation
def test_an_unstaged_volume_is_checked_as_a_stage_checks_it(
    client: Client, host: AnyHost, group: str
) -> None:
    shop = Shop(client, host, group, ENDS)
    shop.fail()
    shop.unstage()
    shop.publish("a")
    assert shop.reasons() == set()


@pytest.mark.variation
def test_a_late_publish_of_a_volume_unstaged_meanwhile_stages_it_with_its_options(
    client: Client, host: AnyHost, group: str
) -> None:
    shop = Shop(client, host, group, ENDS)
    host.kernel.unmount(str(shop.staging))
    host.lvm("lvchange", "--addtag", "carver.remount=yes", "--", f"{group}/vol-pvc-1")
    client.volumes()
    shop.unstage()
    assert "remount" not in shop.own_tags()
    shop.publish("a")
    assert "noatime" in shop.mount().options


@pytest.fixture
def node(host: AnyHost, config: Config, group: str, tmp_path: Path) -> Iterator[Node]:
    """A service that can be killed."""
    made = Node(host, config, group, tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.mark.variation
def test_a_remount_killed_at_any_step_is_completed_by_the_next_call(
    node: Node, host: AnyHost, group: str
) -> None:
    def trial(stop_at: int = -1, before: bool = True) -> list[str]:
        shop = Shop(node.client, host, group, ENDS)
        shop.publish("a")
        shop.fail()
        shop.unpublish("a")
        switch = Switch(stop_at, before=before)
        node.restart(switch)
        shop.client = node.client
        with suppress(grpc.RpcError):
            shop.publish("b")
        taken = list(switch.taken)
        if stop_at >= 0:
            assert switch.dead.wait(expect.PATIENCE_SECONDS)
            node.kill()
            shop.client = node.client
            shop.publish("b")
        assert shop.reasons() == set(), (stop_at, before)
        assert not shop.mount().read_only, (stop_at, before)
        shop.unpublish("b")
        shop.unstage()
        assert "remount" not in shop.own_tags()
        shop.client.delete(shop.volume.volume_id)
        return taken

    steps = trial()
    assert len(steps) > 5
    for stop_at, before in stops(steps):
        trial(stop_at, before)
