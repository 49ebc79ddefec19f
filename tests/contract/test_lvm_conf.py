"""What the node's lvm.conf may say: what Carver outweighs, and what it refuses with a reason."""

from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import pytest
from real.any import AnyHost, device
from serving import served

from agent.csi.client import Client, block
from lvm import groups, report
from proto import csi_pb2 as csi

SIZE = 8 << 20


@pytest.mark.variation
def test_settings_that_make_lvm2_lie_about_success_are_overruled(
    host: AnyHost, tmp_path: Path
) -> None:
    group = host.new_group(20)
    settings = {
        "global__test": "1",
        "global__activation": "0",
        "activation__read_only_volume_list": group,
    }
    config = configured.carver(tmp_path, group)
    with host.configured(**settings) as lvm, served(host, config, lvm) as (_, client):
        volume = client.create("pvc-1", SIZE, block())
        assert not host.kernel.device_is_read_only(device(host, group, "vol-pvc-1"))
        client.delete(volume.volume_id)
    assert not report.read(host.lvm).group(group).volumes


@pytest.mark.variation
def test_a_volume_that_lvm_conf_keeps_inactive_is_refused_with_the_reason(
    host: AnyHost, tmp_path: Path
) -> None:
    group = host.new_group(20)
    with (
        host.configured(activation__volume_list="other") as lvm,
        served(host, configured.carver(tmp_path, group), lvm) as (_, client),
        expect.code("FAILED_PRECONDITION", "activation/volume_list", "put it there"),
    ):
        client.create("pvc-1", SIZE, block())
    assert not report.read(host.lvm).group(group).volumes


@pytest.mark.variation
def test_lvm2_archives_a_bounded_number_of_metadata_copies(host: AnyHost, tmp_path: Path) -> None:
    group, archive = host.new_group(20), tmp_path / "archive"
    archive.mkdir()
    for number in range(70):
        (archive / f"{group}_{number:05}-1.vg").touch()
    kept = ("backup/archive=1", f'backup/archive_dir="{archive}"', "backup/backup=0")
    groups.mark(replace(host.lvm, settings=(*host.lvm.settings, *kept)), group, new_tags={"x": "y"})
    groups.mark(host.lvm, group, old_tags={"x": "y"})
    found = sorted(one.name for one in archive.iterdir())
    assert len(found) == 50
    assert found[0] == f"{group}_00021-1.vg"


FORMATS = (
    "report/compact_output=1",
    'report/compact_output_cols="lv_tags,pv_missing,lv_suspended"',
    "report/binary_values_as_numeric=1",
    "report/mark_hidden_devices=0",
    'report/list_item_separator=";"',
    "report/buffered=0",
    "report/columns_as_rows=1",
    "report/prefixes=1",
    "log/report_command_log=1",
)


@pytest.mark.parametrize(
    "setting",
    chosen.kinds(FORMATS, usual=("report/compact_output=1", "report/binary_values_as_numeric=1")),
)
def test_no_format_of_reports_changes_what_is_read(
    host: AnyHost, group: str, client: Client, volume: csi.Volume, setting: str
) -> None:
    client.create("pvc-2", SIZE, block())
    usual = report.read(host.lvm).group(group)
    assert len(usual.volumes) == 2
    changed = replace(host.lvm, settings=(*host.lvm.settings, setting))
    assert report.read(changed).group(group) == usual
