"""What the node's lvm.conf may say: what Carver outweighs, and what it refuses with a reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
from real.any import AnyHost

from agent.core.host import Host
from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm import groups, report
from lvm.lvm2 import Lvm

MIB = 1 << 20
SIZE = 8 * MIB


@contextmanager
def serving(host: AnyHost, lvm: Lvm, group: str, directory: Path) -> Iterator[Client]:
    """Carver's side of a socket, with that lvm2."""
    config = configured.carver(directory, group)
    service = Service(config, Host(host.run, host.kernel, host.devices, host.disks), lvm)
    service.eraser.grace_seconds = 600
    service.start(config.endpoint)
    try:
        with Client(config.endpoint) as client:
            yield client
    finally:
        service.stop()


@pytest.mark.variation
def test_what_would_have_lvm2_do_something_else_and_tell_of_success_is_outweighed(
    host: AnyHost, tmp_path: Path
) -> None:
    group = host.new_group(20)
    told = {
        "global__test": "1",
        "global__activation": "0",
        "activation__read_only_volume_list": group,
    }
    with host.configured(**told) as lvm, serving(host, lvm, group, tmp_path) as client:
        volume = client.create("pvc-1", SIZE, block())
        device = host.devices.find(group, "vol-pvc-1")
        assert device is not None
        assert not host.kernel.device_is_read_only(device.path)
        client.delete(volume.volume_id)
    assert not report.read(host.lvm).group(group).volumes


@pytest.mark.variation
def test_a_volume_that_lvm_conf_keeps_inactive_is_refused_and_why_is_said(
    host: AnyHost, tmp_path: Path
) -> None:
    group = host.new_group(20)
    told = {"activation__volume_list": "other"}
    with (
        host.configured(**told) as lvm,
        serving(host, lvm, group, tmp_path) as client,
        expect.code("FAILED_PRECONDITION", "activation/volume_list", "put it there"),
    ):
        client.create("pvc-1", SIZE, block())
    assert not report.read(host.lvm).group(group).volumes


@pytest.mark.variation
def test_of_the_metadata_before_each_change_lvm2_keeps_a_bounded_number_of_copies(
    host: AnyHost, tmp_path: Path
) -> None:
    group, archive = host.new_group(20), tmp_path / "archive"
    archive.mkdir()
    for number in range(70):
        (archive / f"{group}_{number:05}-1.vg").touch()
    kept = ("backup/archive=1", f'backup/archive_dir="{archive}"', "backup/backup=0")
    groups.mark(replace(host.lvm, settings=(*host.lvm.settings, *kept)), group, new={"x": "y"})
    groups.mark(host.lvm, group, old={"x": "y"})
    found = sorted(one.name for one in archive.iterdir())
    assert len(found) == 50
    assert found[0] == f"{group}_00021-1.vg"
