"""A raw volume and what happens to it: writes, growth, snapshots, discards, steps of the clock.

What it and its snapshots must hold is learnt from the device that the volume's user reads, which of
an encrypted volume is another than its logical volume.
"""

import errno
import random
import uuid
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace

from clocks import Clock
from real.any import AnyHost

from agent.core import ids
from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.extras.changed_blocks.extents import BLOCK_BYTES
from agent.settings.classes import DeviceClass
from lvm import report, volumes
from mount import luks
from mount.luks import Cryptsetup

KIB, MIB = 1 << 10, 1 << 20
SIZE = 16 * MIB
KEY = {"passphrase": "correct horse battery staple"}
# The prefix of classes of encrypted volumes, which pass discards on.
SEALED = "sealed-"

_STEP_SECONDS = 7200
_END_BYTES = 256 << 10
# A snapshot's, for all that changes after it.
_ROOM = {"size": "100%"}
# What a snapshot's number is kept as.
_NUMBER = "sequence"


def sealed(classes: Iterable[DeviceClass]) -> tuple[DeviceClass, ...]:
    """The same classes, and each once more for encrypted volumes."""
    plain = tuple(classes)
    changed = (
        replace(one, name=f"{SEALED}{one.name}", default=False, encryption="luks2", discard=True)
        for one in plain
    )
    return (*plain, *changed)


class Disk:
    """A raw volume that is written to, and what it and its snapshots must hold."""

    def __init__(
        self, client: Client, service: Service, host: AnyHost, layout: str, name: str = "pvc-1"
    ) -> None:
        self.client, self.service, self.host = client, service, host
        self.device_class = layout
        self.layout = layout.removeprefix(SEALED)
        self.is_sealed = layout.startswith(SEALED)
        made = client.create(name, SIZE, block(), parameters={"class": layout})
        self.volume = made
        self.id = made.volume_id
        self.group, self.name = ids.group_of(self.id), ids.logical_name(self.id)
        self.held = bytearray()
        # The blocks that were written, and not discarded since.
        self.written: set[int] = set()
        # What each snapshot held when it was taken, and which blocks were written by then.
        self.snapshots: dict[str, bytes] = {}
        self.written_at: dict[str, frozenset[int]] = {}
        self.clear(made.capacity_bytes)

    @property
    def device(self) -> str:
        """The device that the volume's user has."""
        if not self.is_sealed:
            return self.logical(self.id)
        found = self.host.devices.find(self.group, self.name)
        if found is None or self.host.devices.mapping(found) is None:
            self.client.stage(self.volume, self.host.directory / "staging", block(), KEY)
            self._see_ends()
        return self._mapping()

    def _mapping(self) -> str:
        found = self.host.devices.find(self.group, self.name)
        assert found is not None
        opened = self.host.devices.mapping(found)
        assert opened is not None
        return opened.path

    def _see_ends(self) -> None:
        """Unwritten ends have zeroes once it is open (mount/luks.py)."""
        for at in {0, max(0, len(self.held) - _END_BYTES)} if self.held else ():
            found = self.host.read_bytes(self._mapping(), at, _END_BYTES)
            for number in _blocks(at, _END_BYTES) - self.written:
                start = number * BLOCK_BYTES
                self.held[start : start + BLOCK_BYTES] = found[start - at :][:BLOCK_BYTES]

    def logical(self, identity: str) -> str:
        """The device of a logical volume."""
        name = ids.logical_name(identity)
        if self.host.devices.find(self.group, name) is None:
            # A copy-on-write snapshot comes with its origin.
            own = name if self.layout == "thin" else self.name
            volumes.activate(self.host.lvm, self.group, own)
        found = self.host.devices.find(self.group, name)
        assert found is not None
        return found.path

    @contextmanager
    def opened(self, identity: str) -> Iterator[str]:
        """The device that the user of the volume, or of a snapshot of it, reads."""
        if identity == self.id:
            yield self.device
        elif not self.is_sealed:
            yield self.logical(identity)
        else:
            program = Cryptsetup(self.host.run, waits_for_udev=luks.has_udev())
            name, key = f"carver-test-{uuid.uuid4().hex}", bytearray(KEY["passphrase"].encode())
            program.open(self.logical(identity), key, name, discard=False, read_only=True)
            try:
                yield f"/dev/mapper/{name}"
            finally:
                program.close(name)

    def read(self, identity: str) -> bytes:
        """All that its user reads."""
        with self.opened(identity) as device:
            return self.host.read_bytes(device, 0, len(self.holds(identity)))

    def lies(self, identity: str, size_bytes: int) -> bytes:
        """What a logical volume holds: past the page cache, as what is written through a key is."""
        with self.host.kernel.opened(self.logical(identity)) as opened:
            return b"".join(opened.read(at, MIB) for at in range(0, size_bytes, MIB))

    def write(self, at: int, data: bytes) -> None:
        self.host.write_bytes(self.device, at, data)
        # Noise that is written back where it was read is as good as never written.
        new = (one for one in _blocks(at, len(data)) if self._is_new(one, at, data))
        self.written |= set(new)
        self.held[at : at + len(data)] = data

    def _is_new(self, number: int, at: int, data: bytes) -> bool:
        start = number * BLOCK_BYTES
        was = self.held[start : start + BLOCK_BYTES]
        return was != data[start - at : start - at + BLOCK_BYTES]

    def discard(self, at: int, length: int) -> None:
        """As fstrim does; what reads there then is the disk's to say."""
        device = self.device
        try:
            self.host.kernel.discard(device, at, length)
        except OSError as error:
            # An origin of copy-on-write snapshots passes none on.
            if error.errno != errno.EOPNOTSUPP:
                raise
        self.held[at : at + length] = self.host.read_bytes(device, at, length)
        self.written -= _blocks(at, length)

    def snapshot(self) -> str:
        taken = self.client.snapshot(f"s-{len(self.snapshots)}", self.id, _ROOM)
        self.snapshots[taken.snapshot_id] = bytes(self.held)
        self.written_at[taken.snapshot_id] = frozenset(self.written)
        return taken.snapshot_id

    @property
    def has_grown(self) -> bool:
        return len(self.held) > self.volume.capacity_bytes

    def grow(self) -> None:
        # As much more as its layout needs.
        size = self.client.expand(self.id, len(self.held) + 4 * MIB).capacity_bytes
        if self.is_sealed:
            # What is open grows with its key only.
            self.client.unstage(self.id, self.host.directory / "staging")
        self.clear(size)

    def clear(self, size_bytes: int) -> None:
        """What it has new holds zeroes: of a thick one it is what was there before.

        That of an encrypted one is noise.
        """
        start, new = len(self.held), bytes(size_bytes - len(self.held))
        if self.is_sealed:
            new = self.host.read_bytes(self.device, start, len(new))
        elif self.layout != "thin":
            self.host.write_bytes(self.device, start, new)
        self.held += new

    def deactivate(self) -> None:
        """As a reboot does: what is needed is activated again."""
        if self.is_sealed:
            self.client.unstage(self.id, self.host.directory / "staging")
        for name in sorted({self.name, *map(ids.logical_name, self.snapshots)}):
            found = report.read(self.host.lvm).group(self.group).volume(name)
            if self.host.devices.find(self.group, name) and not found.is_copy_on_write:
                self.host.deactivate(self.group, name)

    def forget_order(self, snapshot_id: str) -> None:
        """Have a snapshot be as Carver 0.1.0 took it: without its number."""
        name = ids.logical_name(snapshot_id)
        found = report.read(self.host.lvm).group(self.group).volume(name)
        own_tags = found.own_tags
        if _NUMBER in own_tags:
            volumes.mark(
                self.host.lvm, self.group, name, old_tags={_NUMBER: own_tags[_NUMBER]}, new_tags={}
            )

    def holds(self, identity: str) -> bytes:
        return self.snapshots.get(identity) or bytes(self.held)

    def has_written(self, identity: str) -> Set[int]:
        return self.written_at.get(identity, self.written)

    def end(self) -> None:
        """Have nothing be left of it."""
        if self.is_sealed:
            self.client.unstage(self.id, self.host.directory / "staging")
        for one in self.snapshots:
            self.client.delete_snapshot(one)
        self.client.delete(self.id)


def write_some(disk: Disk, chance: random.Random) -> None:
    """Writes as programs make them: here and there, in a row, zeroes, and the same once more."""
    for _ in range(chance.randint(0, 12)):
        at, length = _somewhere(disk, chance, (1, 1, 1, 2, 16, 17, 100))
        kind = chance.choice(("new", "new", "zeroes", "same"))
        data = {
            "new": chance.randbytes(length),
            "zeroes": bytes(length),
            "same": bytes(disk.held[at : at + length]),
        }[kind]
        disk.write(at, data)


def live(disk: Disk, clock: Clock, chance: random.Random) -> None:
    """A random history: at least two snapshots, and whatever else happens to a volume."""
    disk.snapshot()
    for _ in range(chance.randint(3, 6)):
        happen(disk, clock, chance)
    disk.snapshot()
    write_some(disk, chance)
    if chance.random() < 0.3:
        disk.forget_order(chance.choice(list(disk.snapshots)))
    if chance.random() < 0.5:
        disk.deactivate()
        # Opened anew, which may write at its ends.
        disk.read(disk.id)


def happen(disk: Disk, clock: Clock, chance: random.Random) -> None:
    """What may happen to a volume, and writes."""
    events = ["snapshot", "snapshot", "twice", "write", "discard", "clock", "reboot"]
    # Once: it is written to, which takes room of each snapshot.
    match chance.choice(events if disk.has_grown else [*events, "grow"]):
        case "snapshot":
            disk.snapshot()
        case "twice":
            with clock.standing():
                disk.snapshot()
                write_some(disk, chance)
                disk.snapshot()
        case "grow":
            disk.grow()
        case "discard":
            for _ in range(chance.randint(1, 3)):
                disk.discard(*_somewhere(disk, chance, (1, 16, 64, 300)))
        case "clock":
            clock.step(chance.choice((-_STEP_SECONDS, _STEP_SECONDS)))
        case "reboot":
            disk.deactivate()
    write_some(disk, chance)


def unlike(one: bytes, other: bytes) -> set[int]:
    """The numbers of the blocks in which the second differs; the first is zeroes behind its end."""
    one = one.ljust(len(other), b"\0")
    return {
        at // BLOCK_BYTES
        for at in range(0, len(other), BLOCK_BYTES)
        if one[at : at + BLOCK_BYTES] != other[at : at + BLOCK_BYTES]
    }


def _somewhere(disk: Disk, chance: random.Random, lengths: tuple[int, ...]) -> tuple[int, int]:
    count = chance.choice(lengths)
    at = chance.randrange(0, len(disk.held) - count * BLOCK_BYTES, BLOCK_BYTES)
    return at, count * BLOCK_BYTES


def _blocks(at: int, length: int) -> set[int]:
    return set(range(at // BLOCK_BYTES, (at + length) // BLOCK_BYTES))
