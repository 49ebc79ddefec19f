"""What Carver reads of lvm2 is what lvm2 knows, however lvm.conf(5) has reports look."""

from dataclasses import replace

import chosen
import pytest
from real.any import AnyHost

from agent.csi.client import Client, block
from lvm import report
from proto import csi_pb2 as csi

LOOKS = (
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
    chosen.kinds(LOOKS, usual=("report/compact_output=1", "report/binary_values_as_numeric=1")),
)
def test_lvm_conf_cannot_change_what_is_read(
    host: AnyHost, group: str, client: Client, volume: csi.Volume, setting: str
) -> None:
    client.create("pvc-2", 8 << 20, block())
    usual = report.read(host.lvm).group(group)
    assert len(usual.volumes) == 2
    changed = replace(host.lvm, settings=(*host.lvm.settings, setting))
    assert report.read(changed).group(group) == usual
