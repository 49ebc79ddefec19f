"""Tags of groups and volumes: what lvm2 does with a change, and with none."""

import pytest
from real.any import AnyHost

from lvm import groups, report, volumes
from lvm.volumes import New
from mount import mount_errors

EXTENT_BYTES = 4 << 20
VOLUME = "marked"


def test_a_change_of_tags_that_changes_nothing_is_no_error(host: AnyHost) -> None:
    group = host.new_group(10)
    volumes.create(host.lvm, group, New(VOLUME, EXTENT_BYTES, {"k": "v"}))
    before = report.read(host.lvm).group(group)
    groups.mark(host.lvm, group)
    volumes.mark(host.lvm, group, VOLUME, old_tags={}, new_tags={})
    volumes.mark_all(host.lvm, [(group, VOLUME)])
    volumes.add_tags(host.lvm, group, [VOLUME], ())
    assert report.read(host.lvm).group(group) == before

    groups.mark(host.lvm, group, new_tags={"k": "v"})
    groups.mark(host.lvm, group, old_tags={"k": "v"})
    assert report.read(host.lvm).group(group).own_tags == before.own_tags


@pytest.mark.parametrize("subcommand", ["lvchange", "vgchange", "pvchange"])
def test_lvm2_refuses_a_command_that_names_no_change(host: AnyHost, subcommand: str) -> None:
    group = host.new_group(10)
    with pytest.raises(mount_errors.CommandError):
        host.lvm(subcommand, "--", group)
