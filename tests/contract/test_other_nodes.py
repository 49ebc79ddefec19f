"""Groups of another node, of several, or of none: they are reported and left as they are."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import chosen
import configured
import expect
import pytest
import serving
from csi_client import Client
from real.any import AnyHost
from rich.console import Console
from serving import served

from agent.cli import status, terminal
from agent.csi.client import block
from agent.daemon.server import Service
from agent.groups.node_groups import VolumeGroups
from agent.operations import preflight
from agent.operations.preflight import FAIL, PASS, WARN
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from lvm import report
from lvm.labels import PhysicalLabel

MIB = 1 << 20
SIZE = 8 * MIB
OWN, OTHER = (
    ("global/system_id_source=lvmlocal", f"local/system_id={one}") for one in ("this", "that")
)


@dataclass(frozen=True)
class Case:
    """What an operator does with a group, what Carver says then, and how it becomes the node's."""

    take: Callable[[AnyHost, str], object]
    words: tuple[str, ...]
    give_back: Callable[[AnyHost, str], object]


CASES = {
    "exported": Case(
        lambda host, group: host.lvm("vgexport", "--", group),
        ("is exported", "vgimport"),
        lambda host, group: host.lvm("vgimport", "--", group),
    ),
    # docs/operations.md has the commands by which these two are taken over.
    "another node's": Case(
        lambda host, group: host.lvm("vgchange", "--yes", "--systemid", "that", "--", group),
        ("the system id that", "vgexport", "docs/operations.md"),
        lambda host, group: host.lvm(
            "vgchange", "--yes", "--systemid", "", "--", group, settings=OTHER
        ),
    ),
    "shared": Case(
        lambda host, group: host.share(group),
        ("shared with other nodes", "dlm", "vgchange --lock-type none", "docs/operations.md"),
        lambda host, group: host.lvm(
            *("vgchange", "--yes", "--lock-type", "none", "--lockopt", "force", "--", group),
            settings=("global/use_lvmlockd=1",),
        ),
    ),
}


@pytest.fixture
def name(tmp_path: Path) -> str:
    """A group that is not there."""
    return f"other-{tmp_path.parent.name[-6:]}-{tmp_path.name[-20:]}".replace("_", "-")[:40]


@pytest.fixture
def group(host: AnyHost, name: str) -> Iterator[str]:
    """A group of the test's own."""
    with host.own_group(name, [host.new_device(33 * MIB)]):
        yield name


def shown(seen: status.Overview) -> str:
    out = io.StringIO()
    Console(width=500, file=out).print(terminal.status(seen))
    return out.getvalue()


@pytest.mark.parametrize("case", chosen.kinds(CASES, usual=["exported"]))
@pytest.mark.long_on_lvm
def test_a_group_of_another_node_is_reported_and_left_alone_until_it_is_given_back(
    client: Client, service: Service, host: AnyHost, config: Config, group: str, case: str
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    whole = client.volumes_here()
    assert (list(whole.entries), dict(whole.away)) == ([volume], {})
    host.deactivate(group, "vol-pvc-1")
    CASES[case].take(host, group)
    [disk] = _disks_of(host, group)
    before = host.disks.fingerprint([disk])

    words = CASES[case].words
    for call in (client.volume, client.delete):
        with expect.code("FAILED_PRECONDITION", group, *words):
            call(volume.volume_id)
    with expect.code("RESOURCE_EXHAUSTED", group, *words):
        client.create("pvc-2", SIZE, block())
    assert client.capacity().available_capacity == 0
    with expect.code("FAILED_PRECONDITION", group):
        client.volumes()
    # The lists for people name the groups that are away.
    for here in (client.volumes_here(), client.snapshots_here()):
        assert not here.entries
        assert all(word in here.away[group] for word in words)
    [health] = client.storage_health()
    assert all(word in health.message for word in (group, *words))
    [(verdict, message, remedy)] = preflight.CHECKS["groups"](service.node)
    assert (verdict, bool(remedy)) == (FAIL, True)
    assert all(word in message for word in words)
    seen = status.read(
        replace(config, devices=host.lvm.devices),
        serving.machine(host),
    )
    assert not seen.groups[0].present
    assert all(word in seen.groups[0].problem for word in words)
    assert seen.groups[0].problem in shown(seen)
    assert host.disks.fingerprint([disk]) == before, "nothing was written to it"

    CASES[case].give_back(host, group)
    assert client.volume(volume.volume_id).volume.capacity_bytes == SIZE
    assert client.volumes_here().entries == client.volumes()
    client.delete(volume.volume_id)
    assert not report.read(host.lvm).group(group).volumes


def _disks_of(host: AnyHost, group: str) -> set[str]:
    """By their labels: lvm2 may show no such group."""
    return {
        path
        for path, one in host.disks.scan().items()
        if isinstance(one, PhysicalLabel) and one.group is not None and one.group.name == group
    }


@pytest.mark.variation
def test_a_group_with_the_node_s_own_system_id_is_used(
    host: AnyHost, tmp_path: Path, group: str
) -> None:
    own = replace(host.lvm, settings=(*host.lvm.settings, *OWN))
    host.lvm("vgchange", "--yes", "--systemid", "this", "--", group)
    try:
        with served(host, configured.carver(tmp_path, group), own) as (_, client):
            volume = client.create("pvc-1", SIZE, block())
            assert client.volume(volume.volume_id).volume.capacity_bytes == SIZE
            client.delete(volume.volume_id)
    finally:
        own("vgchange", "--yes", "--systemid", "", "--", group)
    assert not report.read(host.lvm).group(group).volumes


@pytest.mark.parametrize(
    ("listed", "state", "verdict"),
    [
        pytest.param(0, "absent", WARN, id="none"),
        pytest.param(1, "partial", WARN, id="one of two", marks=pytest.mark.variation),
        pytest.param(2, "ready", PASS, id="both", marks=pytest.mark.variation),
    ],
)
def test_of_disks_those_are_used_that_the_node_s_devices_file_lists(
    host: AnyHost, tmp_path: Path, listed: int, state: str, verdict: str
) -> None:
    group, elsewhere = host.new_group(20, 10), host.new_device(33 * MIB)
    disks = [disk.name for disk in report.read(host.lvm).group(group).disks]
    root = tmp_path / "root"
    with host.listing(root, elsewhere, *disks[:listed]) as node:
        volume_groups = VolumeGroups(node, host.disks, host.devices, configured.on_groups(group))
        [volume_group] = volume_groups
        seen = volume_group.state()
        assert volume_group.status == state
        assert (seen is not None and len(seen.disks) - seen.missing_disks) == listed
        known = report.read(node)
        assert (group in known.groups) == (listed > 0), "as lvm2 has it"
        config = configured.carver(tmp_path, group)
        looked = preflight.Node(Configuration(config), host.kernel, host.run, lambda: known, root)
        # The others say how its disks are erased.
        found, message, remedy = next(preflight.CHECKS["groups"](looked))
        assert found == verdict
        assert (f"vgimportdevices {group}" in remedy) == ("devices file" in message)
        assert ("devices file" in message) == (verdict == WARN)
