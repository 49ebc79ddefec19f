"""LUKS2 headers, read: what cryptsetup 2.6 wrote at each stage of a re-encryption."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
from fakes import cryptsetup

from mount import luks
from mount.kernel import Kernel

OFFSET, DONE = 4194304, 553648128


def segment(size: int | str, offset: int = OFFSET, *flags: str) -> dict[str, Any]:
    """A segment, with its flags if it has any."""
    made = {"type": "crypt", "offset": str(offset), "size": str(size), "iv_tweak": "0"}
    more = {"flags": list(flags)} if flags else {}
    return {**made, "encryption": "aes-xts-plain64", "sector_size": 4096, **more}


KEPT = {
    "2": segment("dynamic", OFFSET, "backup-previous"),
    "3": segment("dynamic", OFFSET, "backup-final"),
}
REST = segment("dynamic", OFFSET + DONE)
TORN = "in-reencryption"
STAGES = {
    "none": {"0": segment("dynamic")},
    "begun": {"0": segment("dynamic"), **KEPT},
    "interrupted": {"0": segment(DONE), "1": REST, **KEPT},
    "torn at once": {"0": segment(DONE, OFFSET, TORN), "1": REST, **KEPT},
    "torn": {
        "0": segment(DONE),
        "1": segment(1 << 20, OFFSET + DONE, TORN),
        "2": segment("dynamic", OFFSET + DONE + (1 << 20)),
        "3": KEPT["2"],
        "4": KEPT["3"],
    },
}


def metadata(segments: dict[str, Any], *requirements: str) -> dict[str, Any]:
    """What a header says; slot 1 is of the new master key, and 3 of one that never came to be."""
    slots = {one: {"type": "luks2", "kdf": {"type": "argon2id"}} for one in ("0", "1", "3")}
    digests = {
        "0": {"keyslots": ["0"], "segments": ["0"]},
        "1": {"keyslots": ["1"], "segments": ["1"] if requirements else []},
        "2": {"keyslots": ["3"], "segments": []},
    }
    own = {"2": {"type": "reencrypt"}} if requirements else {}
    config = {"requirements": {"mandatory": list(requirements)}} if requirements else {}
    return {
        "keyslots": {**slots, **own},
        "segments": segments,
        "digests": digests,
        "config": config,
    }


@pytest.mark.parametrize("requirement", ["online-reencrypt", "online-reencrypt-v2"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_header_says_that_a_re_encryption_has_not_ended(stage: str, requirement: str) -> None:
    requirements = () if stage == "none" else (requirement,)
    found = luks._header("u", metadata(STAGES[stage], *requirements))
    assert found.offset_bytes == OFFSET
    assert found.is_reencrypting == (stage != "none")


def test_a_slot_of_no_data_opens_nothing() -> None:
    assert luks._header("u", metadata({"0": segment("dynamic")})).slots == (0,)
    found = luks._header("u", metadata(STAGES["interrupted"], "online-reencrypt-v2"))
    assert found.slots == (0, 1)


HEADER = b"".join(cryptsetup.copies("own", metadata(STAGES["none"])))


@dataclass
class Disk:
    """A device whose header is written meanwhile: so often each copy is read half written."""

    torn: int
    reads: int = 0

    def read(self, _device: str, offset: int, length: int) -> bytes:
        data = HEADER[offset : offset + length]
        if length == luks.METADATA_BYTES:
            self.reads += 1
            if self.reads <= 2 * self.torn:
                data = data[:4100] + bytes(len(data) - 4100)
        return data


@pytest.mark.parametrize("torn", [0, 1, 3])
def test_a_header_that_is_written_meanwhile_is_whole_at_the_next_look(torn: int) -> None:
    found = luks.read(cast(Kernel, Disk(torn)), "/dev/any")
    assert found is not None
    assert found.uuid == "own"


def test_a_header_that_is_damaged_stays_so() -> None:
    disk = Disk(torn=1000)
    assert luks.read(cast(Kernel, disk), "/dev/any") is None
    assert disk.reads > 2
