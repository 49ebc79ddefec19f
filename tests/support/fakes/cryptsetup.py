"""cryptsetup for the fake runner: headers on the devices in memory, and dm-crypt devices over them.

A header is written as a real one is, so that what reads headers reads these. The master key is in
it in the open, and each slot has a digest of its key; what is written through a dm-crypt device
lies in the device below as something else.
"""

import hashlib
import json
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fakes import filesystems
from fakes.devices import BLOCK_BYTES, LEFTOVER, FakeDevice, FakeDevices, Media

from mount import luks
from mount.command import Result
from mount.filesystem import Signature

_SECTOR_BYTES = 512
_MAGICS = (b"LUKS\xba\xbe", b"SKUL\xba\xbe")
# What a key makes of a device that is blank below, in the worst case.
NOISE = Signature("hfsplus", "filesystem")
_DONE = Result(0, "", "")
_NO_PERMISSION = Result(2, "", "No key available with this passphrase.\n")
_NO_DEVICE = Result(4, "", "Device does not exist or access denied.\n")


@dataclass
class Sealed(Media):
    """What is in a device by its master key. Its blocks are the device's, and no one's else."""

    outer: Media = field(default_factory=Media)
    first_block: int = 0
    master: bytes = b""
    passes_discards: bool = False

    def copy(self) -> Media:
        # Of what holds it; only what is known of the file system comes along.
        return Media(self.contents, self.fs_size_bytes, self.damage, self.errors)

    def write(self, offset_bytes: int, data: bytes) -> None:
        start = offset_bytes // BLOCK_BYTES + self.first_block
        for at in range(0, len(data), BLOCK_BYTES):
            number = start + at // BLOCK_BYTES
            self.outer.blocks[number] = self._turned(number, data[at : at + BLOCK_BYTES])

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        first = offset_bytes // BLOCK_BYTES + self.first_block
        numbers = range(first, first + length_bytes // BLOCK_BYTES)
        blocks = self.outer.blocks
        return b"".join(self._turned(one, blocks.get(one, bytes(BLOCK_BYTES))) for one in numbers)

    def erase(self, offset_bytes: int, length_bytes: int) -> None:
        # Zeroes are written as anything else is.
        for start in range(offset_bytes, offset_bytes + length_bytes, BLOCK_BYTES):
            self.write(start, bytes(BLOCK_BYTES))

    def forget(self, offset_bytes: int, length_bytes: int) -> None:
        """Have what is below be as if nothing had been written there."""
        self.outer.erase(offset_bytes + self.first_block * BLOCK_BYTES, length_bytes)

    @property
    def looks_like(self) -> Signature | None:
        """Noise that a probe takes for a signature, where nothing was written yet."""
        return None if self.first_block in self.outer.blocks else NOISE

    def flush(self) -> None:
        self.outer.flush()

    def _turned(self, number: int, block: bytes) -> bytes:
        pad = hashlib.sha256(self.master + number.to_bytes(8, "big")).digest()
        pad *= BLOCK_BYTES // len(pad)
        mixed = int.from_bytes(block, "big") ^ int.from_bytes(pad, "big")
        return mixed.to_bytes(BLOCK_BYTES, "big")


class FakeCryptsetup:
    """The program: its actions, by their names."""

    def __init__(self, devices: FakeDevices) -> None:
        self._devices = devices
        # What is in a device, by the UUID of the header that was backed up.
        self._inner: dict[str, Media | None] = {}

    def __call__(self, words: Sequence[str], stdin: bytearray | None) -> Result:
        """Carry out `cryptsetup ACTION …`."""
        action, given = words[1], list(words[2:])
        key = bytes(stdin or b"")
        assert not any(key.decode() in one for one in words if key), "a key among the words"
        at = given.index("--")
        options, rest = given[:at], given[at + 1 :]
        return {
            "luksFormat": self._format,
            "open": self._open,
            "close": self._close,
            "resize": self._resize,
            "luksAddKey": self._add,
            "luksKillSlot": self._kill,
            "reencrypt": self._reencrypt,
            "luksUUID": self._rename,
            "luksHeaderBackup": self._back_up,
            "luksHeaderRestore": self._restore,
        }[action](options, rest, key)

    def _format(self, options: list[str], rest: list[str], key: bytes) -> Result:
        (path,) = rest
        device = self._devices.get(path)
        if self._devices.is_open(path):
            return Result(5, "", f"Cannot use {path}: it is in use.\n")
        offset = int(_option(options, "--offset")) * _SECTOR_BYTES
        sector = int(_option(options, "--sector-size"))
        assert device.size_bytes > offset, "Device is too small."
        assert _option(options, "--type") == "luks2"
        assert _option(options, "--pbkdf") == "argon2id"
        header = {
            "keyslots": {_option(options, "--key-slot"): _slot(key)},
            "segments": {
                "0": {
                    "type": "crypt",
                    "offset": str(offset),
                    "size": "dynamic",
                    "encryption": _option(options, "--cipher"),
                    "sector_size": sector,
                }
            },
            "master": secrets.token_hex(32),
        }
        device.media.inner = None
        _put(device, _option(options, "--uuid"), header)
        return _DONE

    def _open(self, options: list[str], rest: list[str], key: bytes) -> Result:
        path, *name = rest
        device = self._devices.get(path)
        header = _read(device)
        if header is None:
            return Result(1, "", f"Device {path} is not a valid LUKS device.\n")
        slot = _option(options, "--key-slot") if "--key-slot" in options else None
        assert "next" not in header, "a volume that is being re-encrypted is opened"
        if not _opens(header, key, slot):
            return _NO_PERMISSION
        if "--test-passphrase" in options:
            return _DONE
        if self._devices.knows(f"/dev/mapper/{name[0]}"):
            return Result(5, "", f"Device {name[0]} already exists.\n")
        if device.mounted or device.held:
            return Result(5, "", f"Cannot use device {path} which is in use.\n")
        offset = int(header["segments"]["0"]["offset"])
        was = device.media.inner or Media()
        own_tags = (was.contents, was.fs_size_bytes, was.damage, was.errors)
        inner = Sealed(*own_tags, outer=device.media, first_block=offset // BLOCK_BYTES)
        inner.master = bytes.fromhex(header["master"])
        inner.passes_discards = "--allow-discards" in options
        if device.media.inner is None:
            # It came as bytes alone, as streams do.
            filesystems.restore(inner, inner.read(0, BLOCK_BYTES))
        device.media.inner = inner
        size = device.size_bytes - offset
        made = self._devices.add(f"/dev/mapper/{name[0]}", size, inner)
        made.of, made.read_only = device, device.read_only
        made.block_bytes = max(device.block_bytes, int(header["segments"]["0"]["sector_size"]))
        device.held += 1
        return _DONE

    def _close(self, options: list[str], rest: list[str], key: bytes) -> Result:
        path = f"/dev/mapper/{rest[0]}"
        if not self._devices.knows(path):
            return _NO_DEVICE
        made = self._devices.get(path)
        if self._devices.is_open(path):
            return Result(5, "", f"Device {rest[0]} is still in use.\n")
        if made.media.contents is not None:
            made.media.write(0, filesystems.superblock(made.media))
        self._devices.remove(path)
        assert made.of is not None
        made.of.held -= 1
        return _DONE

    def leave(self, path: str) -> None:
        """Leave on a device one of its own, as when it is killed."""
        device = self._devices.get(path)
        self._devices.add(f"{LEFTOVER}{device.minor}", device.size_bytes).of = device
        device.held += 1

    def _reencrypt(self, options: list[str], rest: list[str], key: bytes) -> Result:
        """What an operator says: `--init-only` begins it, `--resume-only` brings it to its end."""
        device = self._devices.get(rest[0])
        header = _header(device)
        if not _opens(header, key, None):
            return _NO_PERMISSION
        if "--init-only" in options:
            header["next"] = secrets.token_hex(32)
            header["config"] = {"requirements": {"mandatory": ["online-reencrypt-v2"]}}
            _put(device, _uuid(device), header)
            return _DONE
        assert "--resume-only" in options
        _renew(device, header)
        return _DONE

    def _rename(self, options: list[str], rest: list[str], key: bytes) -> Result:
        device = self._devices.get(rest[0])
        header = _header(device)
        assert "next" not in header, "Operation incompatible with device marked for reencryption."
        _put(device, _option(options, "--uuid"), header)
        return _DONE

    def _resize(self, options: list[str], rest: list[str], key: bytes) -> Result:
        made = self._devices.get(f"/dev/mapper/{rest[0]}")
        assert made.of is not None
        header = _read(made.of)
        if header is None or not _opens(header, key, None):
            return _NO_PERMISSION
        made.size_bytes = made.of.size_bytes - int(header["segments"]["0"]["offset"])
        return _DONE

    def _add(self, options: list[str], rest: list[str], key: bytes) -> Result:
        device = self._devices.get(rest[0])
        length = int(_option(options, "--keyfile-size"))
        assert len(key) == length + int(_option(options, "--new-keyfile-size"))
        header, slot = _read(device), _option(options, "--new-key-slot")
        if header is None or not _opens(header, key[:length], None):
            return _NO_PERMISSION
        assert slot not in header["keyslots"]
        header["keyslots"][slot] = _slot(key[length:])
        _put(device, _uuid(device), header)
        return _DONE

    def _kill(self, options: list[str], rest: list[str], key: bytes) -> Result:
        device = self._devices.get(rest[0])
        header = _header(device)
        others = {one: how for one, how in header["keyslots"].items() if one != rest[1]}
        if not _opens({"keyslots": others}, key, None):
            return _NO_PERMISSION
        header["keyslots"] = others
        _put(device, _uuid(device), header)
        return _DONE

    def _back_up(self, options: list[str], rest: list[str], key: bytes) -> Result:
        device, file = self._devices.get(rest[0]), _option(options, "--header-backup-file")
        with Path(file).open("xb") as opened:
            opened.write(device.media.read(0, 2 * luks.METADATA_BYTES))
        Path(file).chmod(0o400)
        self._inner[_uuid(device)] = device.media.inner
        return _DONE

    def _restore(self, options: list[str], rest: list[str], key: bytes) -> Result:
        device = self._devices.get(rest[0])
        device.media.write(0, Path(_option(options, "--header-backup-file")).read_bytes())
        device.media.inner = self._inner[_uuid(device)]
        device.contents = Signature("crypto_LUKS", "crypto", _uuid(device), "carver")
        return _DONE


def _renew(device: FakeDevice, header: dict[str, Any]) -> None:
    """Have what is in a device lie there by the next master key."""
    offset_bytes = int(header["segments"]["0"]["offset"])
    first, length = offset_bytes // BLOCK_BYTES, device.size_bytes - offset_bytes
    old, new = (
        Sealed(outer=device.media, first_block=first, master=bytes.fromhex(header[one]))
        for one in ("master", "next")
    )
    numbers = device.media.part(offset_bytes, length)
    plain = {one: old.read((one - first) * BLOCK_BYTES, BLOCK_BYTES) for one in numbers}
    for number, data in plain.items():
        new.write((number - first) * BLOCK_BYTES, data)
    header["master"] = header.pop("next")
    del header["config"]
    _put(device, _uuid(device), header)


def _slot(key: bytes) -> dict[str, Any]:
    kdf = {"type": "argon2id"}
    return {"type": "luks2", "key": hashlib.sha256(key).hexdigest(), "kdf": kdf}


def _opens(header: dict[str, Any], key: bytes, slot: str | None) -> bool:
    slots = header["keyslots"]
    every = [slots[slot]] if slot in slots else list(slots.values()) if slot is None else []
    return any(one.get("key") == hashlib.sha256(key).hexdigest() for one in every)


def copies(uuid: str, header: dict[str, Any]) -> Iterator[bytes]:
    """Both copies of a header that says so, in their order on a disk, each METADATA_BYTES long."""
    text = json.dumps(header).encode()
    assert len(text) < luks.METADATA_BYTES - BLOCK_BYTES
    for number, magic in enumerate(_MAGICS):
        start = number * luks.METADATA_BYTES
        binary = struct.pack(
            *(">6s H Q Q 48s 32s 64s 40s 48s Q", magic, 2, luks.METADATA_BYTES, 1, b"carver"),
            *(b"sha256", bytes(64), uuid.encode(), b"", start),
        )
        whole = binary.ljust(BLOCK_BYTES, b"\0") + text
        whole = whole.ljust(luks.METADATA_BYTES, b"\0")
        yield whole[:448] + luks.digest(whole, "sha256") + whole[512:]


def _put(device: FakeDevice, uuid: str, header: dict[str, Any]) -> None:
    """Both copies of a header, as they stand on a disk."""
    slots = list(header["keyslots"])
    # Made of nothing else, so it is as good as a master key's own name.
    master = hashlib.sha256(header["master"].encode()).hexdigest()
    digest = {"type": "pbkdf2", "keyslots": slots, "segments": ["0"], "digest": master}
    _write(device, uuid, {**header, "digests": {"0": digest}})


def _write(device: FakeDevice, uuid: str, header: dict[str, Any]) -> None:
    for number, copy in enumerate(copies(uuid, header)):
        device.media.write(number * luks.METADATA_BYTES, copy)
    device.contents = Signature("crypto_LUKS", "crypto", uuid, "carver")


def _read(device: FakeDevice) -> dict[str, Any] | None:
    if (data := _whole(device)) is None:
        return None
    return cast("dict[str, Any]", json.loads(data[BLOCK_BYTES:].rstrip(b"\0")))


def _whole(device: FakeDevice) -> bytes | None:
    """The first whole copy of a header."""
    for number, magic in enumerate(_MAGICS):
        data = device.media.read(number * luks.METADATA_BYTES, luks.METADATA_BYTES)
        if data.startswith(magic) and luks.digest(data, "sha256") == data[448:512]:
            return data
    return None


def _header(device: FakeDevice) -> dict[str, Any]:
    """What the header of a device says, which must be there."""
    found = _read(device)
    assert found is not None
    return found


def _uuid(device: FakeDevice) -> str:
    found = _whole(device)
    assert found is not None
    return found[168:208].rstrip(b"\0").decode()


def _option(options: list[str], name: str) -> str:
    return options[options.index(name) + 1]
