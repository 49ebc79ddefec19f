"""What a newer version left, after a way back: used as far as it is known, else left alone."""

from collections.abc import Callable, Iterator

import expect
import pytest
from csi_client import Client
from real.any import AnyHost, names

from agent.core.host import Host
from agent.core.settings import Config
from agent.csi.client import block, of_snapshot
from agent.daemon import server
from agent.daemon.server import Service
from lvm import report
from proto import csi_pb2 as csi

MIB = 1 << 20
NEEDED = "carver.needs=moonlight"
SENTENCE = "newer version of Carver made it, with moonlight"


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    """A raw one."""
    return client.create("pvc-1", 8 * MIB, block())


@pytest.fixture
def snapshot(client: Client, volume: csi.Volume) -> csi.Snapshot:
    return client.snapshot("before", volume.volume_id)


def tag(host: AnyHost, group: str, name: str, *words: str) -> None:
    host.lvm("lvchange", *words, "--", f"{group}/{name}")


def own_tags(host: AnyHost, group: str, name: str) -> dict[str, str]:
    return dict(report.read(host.lvm).group(group).volume(name).own_tags)


@pytest.fixture
def calls(
    client: Client, host: AnyHost, volume: csi.Volume, snapshot: csi.Snapshot
) -> list[Callable[[], object]]:
    """Each call about the volume, and about its snapshot."""
    one, of = volume.volume_id, of_snapshot(snapshot.snapshot_id)
    staging = host.directory / "staging"
    return [
        lambda: client.create("pvc-1", 8 * MIB, block()),
        lambda: client.stage(volume, staging, block()),
        lambda: client.expand(one, 16 * MIB),
        lambda: client.modify(one, {"readAhead": "1MiB"}),
        lambda: client.snapshot("after", one),
        lambda: client.create("copy", 8 * MIB, block(), source=of),
        lambda: client.delete_snapshot(snapshot.snapshot_id),
        lambda: client.delete(one),
    ]


def test_what_only_a_newer_version_knows_is_refused_and_left_alone(
    client: Client,
    host: AnyHost,
    group: str,
    volume: csi.Volume,
    calls: list[Callable[[], object]],
) -> None:
    for name in ("vol-pvc-1", "snap-before"):
        tag(host, group, name, "--addtag", NEEDED)
    before = names(host, group), own_tags(host, group, "vol-pvc-1")
    for call in calls:
        with expect.code("FAILED_PRECONDITION", SENTENCE):
            call()
    assert (names(host, group), own_tags(host, group, "vol-pvc-1")) == before
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    # The newer one again.
    for name in ("vol-pvc-1", "snap-before"):
        tag(host, group, name, "--deltag", NEEDED)
    client.stage(volume, host.directory / "staging", block())


def test_keys_without_which_nothing_is_harmed_are_passed_over_and_kept(
    client: Client, host: AnyHost, group: str, volume: csi.Volume
) -> None:
    tag(host, group, "vol-pvc-1", "--addtag", "carver.shimmer=blue")
    volume.volume_context["carver/shimmer"] = "blue"
    staging, target = host.directory / "staging", host.directory / "target"
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    client.modify(volume.volume_id, {"readAhead": "1MiB"})
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.expand(volume.volume_id, 16 * MIB)
    assert own_tags(host, group, "vol-pvc-1")["shimmer"] == "blue"


def test_a_parameter_of_a_newer_version_is_refused(client: Client) -> None:
    with expect.code("INVALID_ARGUMENT", "carver/shimmer"):
        client.create("pvc-2", 8 * MIB, block(), parameters={"carver/shimmer": "blue"})


@pytest.fixture
def restart(config: Config, host: AnyHost, service: Service) -> Iterator[Callable[[], Service]]:
    """End the service, and return a new one that went on with what was left."""
    begun: list[Service] = []

    def again() -> Service:
        service.stop()
        begun.append(
            Service(config, Host(host.run, host.kernel, host.devices, host.disks), host.lvm)
        )
        begun[-1].eraser.grace_seconds = 600
        server.resume(begun[-1])
        return begun[-1]

    yield again
    for one in begun:
        one.stop()


def test_a_deleted_volume_that_only_a_newer_version_can_erase_is_not_erased(
    host: AnyHost, group: str, volume: csi.Volume, restart: Callable[[], Service]
) -> None:
    state = ("--deltag", "carver.state=ready", "--addtag", "carver.state=wiping")
    tag(host, group, "vol-pvc-1", *state, "--addtag", NEEDED)
    again = restart()
    again.eraser.jobs.stop()
    assert "vol-pvc-1" in names(host, group)
    assert again.eraser.jobs.counts()["failed"] == 0
