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


def taken(directory: Path, facts: dict[str, str], encryption: str = "") -> dict[str, str]:
    host = FakeHost(directory)
    group = host.new_group(100)
    one = DeviceClass("plain", group, encryption=encryption)
    header = Header("volume", "snapshot", SIZE, 17, "chain", facts=facts)
    return sending.tags_of("copy", one, header, SIZE, report.read(host.lvm).group(group))


def test_the_facts_of_encryption_are_kept(tmp_path: Path) -> None:
    for encryption in ("", "luks2"):
        assert SEALED.items() <= taken(tmp_path, SEALED, encryption).items()


@pytest.mark.parametrize(
    ("facts", "field"),
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
def test_wrong_facts_of_encryption_are_refused(
    tmp_path: Path, facts: dict[str, str], field: str
) -> None:
    with pytest.raises((errors.BadField, errors.NotAllowed), match=field):
        taken(tmp_path, facts)


def test_a_class_that_encrypts_refuses_plain_streams(tmp_path: Path) -> None:
    with pytest.raises(errors.BadField, match="class plain encrypts"):
        taken(tmp_path, {"fsType": "ext4", "access": "mount"}, "luks2")
    assert taken(tmp_path, {"fsType": "ext4", "access": "mount"})["fsType"] == "ext4"
