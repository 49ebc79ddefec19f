"""Growth that meets other work: zeroing before use, snapshots, a clone, another size, a restart."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import configured
import expect
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, logical, names

from agent.csi.client import mounted, of_volume
from agent.daemon.server import Service
from agent.settings.settings import Config
from proto import csi_pb2 as csi

MIB = 1 << 20
FULL = {"class": "full"}
pytestmark = [
    # Carver's record decides here; lvm2 is asked for nothing that other tests do not ask it for.
    pytest.mark.variation,
    pytest.mark.settings(controller_expand=True, classes=(configured.PLAIN, configured.FULL)),
]


@pytest.fixture
def waits(
    service: Service, host: AnyHost, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """Zeroing of what a volume grows by waits for this, or until it is called off."""
    go, zero_out = threading.Event(), host.kernel.zero_out
    service.growth_zeroer.grace_seconds = 0.2

    def zeroing(path: str, *where: Any, **more: Any) -> None:
        if "grow" in path:
            jobs = service.growth_zeroer.jobs.unfinished()
            expect.soon(lambda: go.is_set() or any(one.cancelled.is_set() for one in jobs))
        zero_out(path, *where, **more)

    monkeypatch.setattr(host.kernel, "zero_out", zeroing)
    yield go
    go.set()


def size(host: AnyHost, group: str) -> int:
    return logical(host, group, "vol-pvc-1").size_bytes // MIB


@pytest.fixture
def recorded(client: Client, staging: Path) -> csi.Volume:
    """A volume with a snapshot, to be zeroed fully, whose growth to 96 MiB is on record."""
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"), parameters=FULL)
    client.stage(volume, staging, mounted("ext4"))
    client.snapshot("s", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", "grows when it is staged next"):
        client.expand(volume.volume_id, 96 * MIB)
    client.unstage(volume.volume_id, staging)
    return volume


def test_a_stage_waits_until_what_the_volume_grows_by_is_zeroed(
    client: Client,
    service: Service,
    host: AnyHost,
    group: str,
    staging: Path,
    recorded: csi.Volume,
    waits: threading.Event,
) -> None:
    with expect.code("ABORTED", "is overwritten"):
        client.stage(recorded, staging, mounted("ext4"))
    waits.set()
    service.growth_zeroer.grace_seconds = 30
    client.stage(recorded, staging, mounted("ext4"))
    assert (size(host, group), names(host, group)) == (96, {"snap-s", "vol-pvc-1"})
    client.unstage(recorded.volume_id, staging)


@pytest.mark.variation
def test_a_stage_after_a_restart_takes_over_what_was_reserved(
    host: AnyHost,
    group: str,
    config: Config,
    staging: Path,
    client: Client,
    service: Service,
    recorded: csi.Volume,
    waits: threading.Event,
) -> None:
    with expect.code("ABORTED", "is overwritten"):
        client.stage(recorded, staging, mounted("ext4"))
    service.stop()
    waits.set()
    with ExitStack() as ending:
        again = serving.start(config, host)
        ending.callback(again.stop)
        caller = ending.enter_context(Client(config.endpoint))
        caller.stage(recorded, staging, mounted("ext4"))
        assert size(host, group) == 96
        assert "grow-vol-pvc-1" not in names(host, group)
        caller.unstage(recorded.volume_id, staging)


def test_a_stage_whose_growth_cannot_be_zeroed_goes_on_with_the_present_size(
    client: Client,
    host: AnyHost,
    group: str,
    staging: Path,
    recorded: csi.Volume,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero_out = host.kernel.zero_out

    def fails(path: str, *where: Any, **more: Any) -> None:
        if "grow" in path:
            raise OSError(5, "Input/output error", path)
        zero_out(path, *where, **more)

    monkeypatch.setattr(host.kernel, "zero_out", fails)
    client.stage(recorded, staging, mounted("ext4"))
    assert size(host, group) == 64
    client.unstage(recorded.volume_id, staging)


@pytest.mark.parametrize("asked", [96, 64], ids=["another size", "the present size"])
def test_growth_that_is_being_zeroed_can_be_withdrawn(
    client: Client,
    service: Service,
    host: AnyHost,
    group: str,
    waits: threading.Event,
    asked: int,
) -> None:
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"), parameters=FULL)
    with expect.code("ABORTED", "is overwritten"):
        client.expand(volume.volume_id, 128 * MIB)
    if asked == 64:
        client.expand(volume.volume_id, 64 * MIB)
        assert names(host, group) == {"vol-pvc-1"}
    else:
        with expect.code("ABORTED", "is overwritten"):
            client.expand(volume.volume_id, 96 * MIB)
        waits.set()
        service.growth_zeroer.grace_seconds = 30
        client.expand(volume.volume_id, 96 * MIB)
    assert (size(host, group), names(host, group)) == (asked, {"vol-pvc-1"})
    assert not {"wanted", "refused"} & logical(host, group, "vol-pvc-1").own_tags.keys()


def test_a_volume_is_deleted_while_what_it_grows_by_is_zeroed(
    client: Client, host: AnyHost, group: str, waits: threading.Event
) -> None:
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"), parameters=FULL)
    with expect.code("ABORTED", "is overwritten"):
        client.expand(volume.volume_id, 128 * MIB)
    client.delete(volume.volume_id)
    assert not names(host, group)


def test_a_claim_that_is_raised_during_a_clone_is_served_after_it(
    client: Client,
    service: Service,
    host: AnyHost,
    group: str,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    go, begun, copy = threading.Event(), threading.Event(), host.kernel.copy

    def copying(*where: Any, **more: Any) -> None:
        begun.set()
        assert go.wait(expect.PATIENCE_SECONDS)
        copy(*where, **more)

    monkeypatch.setattr(host.kernel, "copy", copying)
    source = of_volume(volume.volume_id)
    cloning = threading.Thread(
        target=lambda: client.create("clone", 64 * MIB, mounted("ext4"), source=source)
    )
    cloning.start()
    assert begun.wait(expect.PATIENCE_SECONDS)
    # The copy may begin a moment before CreateVolume has left the source's name.
    service.context.locks.grace_seconds = 60
    with expect.code("ABORTED", "it grows when that is done"):
        client.expand(volume.volume_id, 96 * MIB)
    assert "wanted" not in logical(host, group, "vol-pvc-1").own_tags
    # To a pod that starts it is "in use, later", which kubelet lets it start with.
    with expect.code("FAILED_PRECONDITION", "when it is staged next"):
        client.node_expand(volume.volume_id, staging, 96 * MIB)
    go.set()
    cloning.join(expect.PATIENCE_SECONDS)
    client.expand(volume.volume_id, 96 * MIB)
    assert size(host, group) == 96
    client.unstage(volume.volume_id, staging)
