"""LUKS2 headers, read: what cryptsetup 2.6 wrote at each stage of a re-encryption."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import cryptsetup
from fakes.host import FakeHost

from mount import luks
from mount.kernel import Kernel

OFFSET, DONE = 4194304, 553648128
DEVICE, SECRET_AT = "/dev/fake", 32768


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
    "none": ({"0": segment("dynamic")}, (False, 0, False)),
    "begun": ({"0": segment("dynamic"), **KEPT}, (True, 0, False)),
    "ended": ({"0": segment(DONE), "1": REST, **KEPT}, (True, DONE, False)),
    "torn at once": ({"0": segment(DONE, OFFSET, TORN), "1": REST, **KEPT}, (True, 0, True)),
    "torn": (
        {
            "0": segment(DONE),
            "1": segment(1 << 20, OFFSET + DONE, TORN),
            "2": segment("dynamic", OFFSET + DONE + (1 << 20)),
            "3": KEPT["2"],
            "4": KEPT["3"],
        },
        (True, DONE, True),
    ),
}


def metadata(segments: dict[str, Any], *, is_reencrypting: bool) -> dict[str, Any]:
    """What a header says; slot 1 is of the new master key, and 3 of one that never came to be."""
    slots = {one: {"type": "luks2", "kdf": {"type": "argon2id"}} for one in ("0", "1", "3")}
    digests = {
        "0": {"keyslots": ["0"], "segments": ["0"]},
        "1": {"keyslots": ["1"], "segments": ["1"] if is_reencrypting else []},
        "2": {"keyslots": ["3"], "segments": []},
    }
    own = {"2": {"type": "reencrypt"}} if is_reencrypting else {}
    return {"keyslots": {**slots, **own}, "segments": segments, "digests": digests}


@pytest.mark.parametrize("stage", STAGES)
def test_how_far_a_re_encryption_is(stage: str) -> None:
    segments, (is_reencrypting, renewed_bytes, is_torn) = STAGES[stage]
    found = luks._header("u", metadata(segments, is_reencrypting=is_reencrypting))
    assert found.offset_bytes == OFFSET
    assert found.is_reencrypting == is_reencrypting
    assert found.renewed_bytes == renewed_bytes
    assert found.is_torn == is_torn


LAST = {"0": segment("dynamic"), "1": KEPT["2"], "2": KEPT["3"]}
OLD_AREA = {"offset": "32768", "size": "8192"}


def last_but_one(old_slots: list[str]) -> dict[str, Any]:
    """What a header says when all of the data has the new master key, of slot 1."""
    slot = {"type": "luks2", "kdf": {"type": "argon2id"}, "area": OLD_AREA}
    return {
        "keyslots": {"1": slot, "2": {"type": "reencrypt"}} | dict.fromkeys(old_slots, slot),
        "segments": LAST,
        "digests": {
            "0": {"keyslots": old_slots, "segments": ["1"]},
            "1": {"keyslots": ["1"], "segments": ["0", "2"]},
            "2": {"keyslots": ["2"], "segments": []},
        },
        "tokens": {"0": {"type": "any", "keyslots": ["1", *old_slots]}},
        "config": {"requirements": {"mandatory": ["online-reencrypt-v2"]}, "json_size": "12288"},
    }


COMPLETE = {
    "segments": {"0": segment("dynamic")},
    "digests": {"1": {"keyslots": ["1"], "segments": ["0"]}},
    "tokens": {"0": {"type": "any", "keyslots": ["1"]}},
    "config": {"json_size": "12288"},
}


def on_a_device(metadata: dict[str, Any]) -> FakeHost:
    """A host with a device that has a header, and what looks like a key where its areas are."""
    host = FakeHost(Path("/nowhere"))
    host.block.add(DEVICE, 16 << 20)
    data = b"".join(cryptsetup.copies("own", metadata)).ljust(SECRET_AT, b"\0")
    host.kernel.write(DEVICE, 0, data + b"\1" * 8192)
    return host


@pytest.mark.parametrize("old_slots", [[], ["0"], ["0", "4"]])
def test_a_re_encryption_is_ended_with_or_without_slots_of_the_old_key(
    old_slots: list[str],
) -> None:
    host = on_a_device(last_but_one(old_slots))
    found = luks.read(host.kernel, DEVICE)
    assert found is not None
    assert found.is_renewed
    luks.complete(host.kernel, DEVICE)
    found = luks.read(host.kernel, DEVICE)
    assert found is not None
    assert (found.uuid, found.slots, found.unbound) == ("own", (1,), ())
    assert not found.is_reencrypting
    for number in range(2):
        copy = luks._copy(host.kernel.read(DEVICE, number * 16384, 16384), number)
        assert copy is not None
        assert copy.sequence == 2
        said = {one: copy.metadata[one] for one in COMPLETE}
        assert said == COMPLETE
        assert set(copy.metadata["keyslots"]) == {"1"}
    # The old master key is not to be had from its slot.
    left = host.kernel.read(DEVICE, SECRET_AT, 8192)
    assert left == (bytes(8192) if old_slots else b"\1" * 8192)


def test_half_of_the_end_written_is_ended_by_the_next_attempt() -> None:
    host = on_a_device(last_but_one(["0"]))
    before = host.kernel.read(DEVICE, 16384, 16384)
    luks.complete(host.kernel, DEVICE)
    whole = luks.read(host.kernel, DEVICE)
    host.kernel.write(DEVICE, 16384, before)
    assert luks.read(host.kernel, DEVICE) == whole
    host.kernel.write(DEVICE, 0, bytes(16384))
    luks.complete(host.kernel, DEVICE)
    assert luks.read(host.kernel, DEVICE) == whole


@pytest.mark.parametrize("stage", STAGES)
def test_no_other_header_is_ended(stage: str) -> None:
    segments, (is_reencrypting, *_) = STAGES[stage]
    host = on_a_device(metadata(segments, is_reencrypting=is_reencrypting))
    before = host.kernel.read(DEVICE, 0, 2 * 16384)
    with pytest.raises(ValueError, match="does not lack the end"):
        luks.complete(host.kernel, DEVICE)
    assert host.kernel.read(DEVICE, 0, 2 * 16384) == before


def test_a_slot_of_no_data_opens_nothing() -> None:
    found = luks._header("u", metadata({"0": segment("dynamic")}, is_reencrypting=False))
    assert (found.slots, found.unbound) == ((0,), (1, 3))
    found = luks._header("u", metadata(STAGES["ended"][0], is_reencrypting=True))
    assert (found.slots, found.unbound) == ((0, 1), (3,))


HEADER = b"".join(cryptsetup.copies("own", metadata(STAGES["none"][0], is_reencrypting=False)))


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
