"""CreateVolume is repeated after the configuration changed: its volume is found."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace

import expect
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, names

from agent.csi.client import mounted, of_snapshot
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config

# Carver's own record decides here; lvm2 is asked for nothing that other tests do not ask it for.
pytestmark = pytest.mark.variation

MIB = 1 << 20
SIZE = 64 * MIB
# What becomes of the class by which the first call made the volume.
CHANGES: dict[str, Callable[[DeviceClass, str], tuple[DeviceClass, ...]]] = {
    "none": lambda one, _: (one,),
    "mkfs options": lambda one, _: (replace(one, mkfs_options=("-m", "1")),),
    "file system": lambda one, _: (replace(one, fs_type="xfs"),),
    "zero": lambda one, _: (replace(one, zero="fully"),),
    "gone": lambda one, _: (replace(one, name="third"),),
    "gone, with the default": lambda one, _: (replace(one, name="third", default=False),),
    "another default": lambda one, _: (replace(one, default=False), replace(one, name="new")),
    "another group": lambda one, other: (replace(one, group=other), replace(one, name="old")),
}


@pytest.mark.parametrize("named", [True, False], ids=["class named", "default class"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_repeated_create_after_a_change_of_the_class_finds_its_volume(
    host: AnyHost,
    group: str,
    config: Config,
    change: str,
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = host.new_group(50)
    plain = DeviceClass("plain", group, default=True)
    before = replace(config, classes=(plain, DeviceClass("keeps", other)))
    made = CHANGES[change](plain, other)
    after = replace(config, classes=(*made, DeviceClass("keeps", other), DeviceClass("own", group)))
    parameters = {"class": "plain"} if named else {}
    service = serving.start(before, host)
    with Client(config.endpoint) as client, monkeypatch.context() as dying:
        source = client.create("pvc-1", SIZE, mounted(""))
        content = of_snapshot(client.snapshot("s", source.volume_id).snapshot_id)

        def dies(*_words: object, **_more: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        dying.setattr(host.kernel, "copy", dies)
        with expect.code("ABORTED"):
            client.create("copy", SIZE, mounted(""), source=content, parameters=parameters)
        service.stop()
    service = serving.start(after, host)
    with Client(config.endpoint) as client:
        volume = client.create("copy", SIZE, mounted(""), source=content, parameters=parameters)
        assert volume.volume_id.startswith(f"{group}@")
        assert "vol-copy" not in names(host, other)
        client.delete(volume.volume_id)
    service.stop()
