"""What a stream says of its volume: taken over, or refused before there is a volume."""

from pathlib import Path

import pytest
from fakes.host import FakeHost

from agent.core import errors
from agent.core.classes import DeviceClass
from agent.extras.streams.form import Header
from agent.extras.transfer import sending
from lvm import report

MIB = 1 << 20
SIZE = 64 * MIB
UUID = "5b9f7f0a-6b0e-4d5c-9d27-0f0f8c1f6c3e"
SEALED = {"encryption": "luks2", "header": str(4 * MIB), "sealed": UUID}


def taken(directory: Path, told: dict[str, str], encryption: str = "") -> dict[str, str]:
    host = FakeHost(directory)
    group = host.new_group(100)
    one = DeviceClass("plain", group, encryption=encryption)
    header = Header("volume", "snapshot", SIZE, 17, "chain", facts=told)
    return sending.tags_of("copy", one, header, SIZE, report.read(host.lvm).group(group))


def test_how_a_volume_is_encrypted_comes_with_it(tmp_path: Path) -> None:
    for encryption in ("", "luks2"):
        assert SEALED.items() <= taken(tmp_path, SEALED, encryption).items()


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({**SEALED, "header": ""}, "header"),
        ({**SEALED, "header": "1e9"}, "header"),
        ({**SEALED, "header": "512"}, "header"),
        ({**SEALED, "header": str(SIZE)}, "header"),
        ({**SEALED, "sealed": "../etc"}, "sealed"),
        ({**SEALED, "encryption": "rot13"}, "encryption"),
        ({"header": str(4 * MIB)}, "header"),
        ({"sealed": UUID}, "header"),
    ],
)
def test_what_does_not_tell_how_it_is_encrypted_is_refused(
    tmp_path: Path, told: dict[str, str], field: str
) -> None:
    with pytest.raises((errors.BadField, errors.NotAllowed), match=field):
        taken(tmp_path, told)


def test_a_class_that_encrypts_takes_nothing_plain(tmp_path: Path) -> None:
    with pytest.raises(errors.BadField, match="class plain encrypts"):
        taken(tmp_path, {"fsType": "ext4", "access": "mount"}, "luks2")
    assert taken(tmp_path, {"fsType": "ext4", "access": "mount"})["fsType"] == "ext4"
