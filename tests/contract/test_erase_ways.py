"""What was deleted shows in no volume that is made of its extents, by whichever way it was erased.

docs/security.md has the table of disks and ways.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import chosen
import configured
import pytest
from real.any import AnyHost, device

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.settings import Config
from mount.block_io import By

MIB = 1 << 20
SIZE = 24 * MIB
SECRET = b"an earlier tenant's secret".ljust(4096, b".")
LAYOUTS = configured.layouts("linear", "striped", "raid1", "thin")
ZERO, DISCARD, ANY = "zero", "discard", "discard-unguaranteed"

# By disk and setting: the ways that are tried, until one is proved.
WAYS: Mapping[str, Mapping[str, Sequence[By]]] = {
    "loop": {ZERO: [By.HOLE], DISCARD: [By.DISCARD], ANY: [By.DISCARD]},
    "no write zeroes": {ZERO: [By.ZEROES], DISCARD: [By.ZEROES], ANY: [By.DISCARD]},
    "LBPRZ": {ZERO: [By.HOLE], DISCARD: [By.DISCARD], ANY: [By.DISCARD]},
    "no LBPRZ": {ZERO: [By.HOLE], DISCARD: [By.HOLE], ANY: [By.DISCARD, By.HOLE]},
    "false LBPRZ": {
        ZERO: [By.HOLE, By.WRITES],
        DISCARD: [By.DISCARD, By.HOLE, By.WRITES],
        ANY: [By.DISCARD, By.HOLE, By.WRITES],
    },
}
CASES = [f"{kind}: {wipe}" for kind, ways in WAYS.items() for wipe in ways]
USUAL = ["false LBPRZ: discard"]


class Asked:
    """The ways by which devices were zeroed, each once, in their order."""

    def __init__(self, host: AnyHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ways: list[By] = []
        self._kernel, self._real = host.kernel, host.kernel.zero_out
        monkeypatch.setattr(host.kernel, "_distrusted", set())
        monkeypatch.setattr(host.kernel, "zero_out", self._zero_out)

    def _zero_out(self, path: str, offset: int, length: int, **how: Any) -> None:
        if (by := how.get("method") or self._kernel.zeroing(path)) not in self.ways:
            self.ways.append(by)
        self._real(path, offset, length, **how)


@pytest.fixture
def asked(host: AnyHost, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(host, monkeypatch)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of disk, and the setting."""
    kind, _, wipe = str(getattr(request, "param", "loop: discard")).partition(": ")
    return kind, wipe


@pytest.fixture
def group(host: AnyHost, case: tuple[str, str], tmp_path: Path) -> Iterator[str]:
    """A group on such a disk."""
    name = f"ways-{tmp_path.parent.name[-6:]}-{tmp_path.name[-12:]}".replace("_", "-")
    with host.disk(case[0], 64 * MIB) as disk, host.own_group(name, [disk]):
        yield name


@pytest.fixture
def config(group: str, case: tuple[str, str], tmp_path: Path) -> Config:
    return configured.carver(tmp_path, group, wipe=case[1])


def fill(host: AnyHost, path: str) -> None:
    for offset in range(0, host.kernel.device_size_bytes(path), MIB):
        host.write_bytes(path, offset, SECRET * (MIB // len(SECRET)))


def contents(host: AnyHost, path: str) -> bytes:
    size = host.kernel.device_size_bytes(path)
    return b"".join(host.read_bytes(path, at, MIB) for at in range(0, size, MIB))


@pytest.mark.parametrize("case", chosen.kinds(CASES, usual=USUAL), indirect=True)
def test_a_deleted_volume_does_not_show(
    client: Client, host: AnyHost, group: str, case: tuple[str, str], asked: Asked
) -> None:
    size = client.capacity().maximum_volume_size.value
    for name in ("first", "second"):
        asked.ways.clear()
        volume = client.create(name, size, block())
        path = device(host, group, f"vol-{name}")
        assert contents(host, path) == bytes(size)
        fill(host, path)
        client.delete(volume.volume_id)
        # What was found out about the disk holds for the next volume.
        kind, wipe = case
        assert asked.ways == WAYS[kind][wipe][-1 if name == "second" else 0 :]
    volume = client.create("third", size, block())
    assert contents(host, device(host, group, "vol-third")) == bytes(size)
    client.delete(volume.volume_id)


class TestLayouts:
    """Under `wipe = "discard"`, on disks of which a discard is certain to leave zeroes."""

    @pytest.fixture
    def group(self, host: AnyHost) -> str:
        return host.new_group(*[24] * 3)

    @pytest.fixture
    def config(self, group: str, tmp_path: Path) -> Config:
        classes = configured.classes(group, LAYOUTS)
        return configured.carver(tmp_path, group, wipe="discard", classes=classes)

    @pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["raid1"]))
    @pytest.mark.long_on_lvm
    def test_a_deleted_volume_does_not_show(
        self,
        client: Client,
        service: Service,
        host: AnyHost,
        group: str,
        name: str,
        asked: Asked,
    ) -> None:
        volume = client.create("pvc-1", SIZE, block(), parameters={"class": name})
        client.stage(volume, host.directory / "staging", block())
        fill(host, device(host, group, "vol-pvc-1"))
        client.unstage(volume.volume_id, host.directory / "staging")
        client.delete(volume.volume_id)
        if name == "thin":
            service.pool_remover.remove_if_empty(group, "pool-thin").result(600)
        is_plain = name in ("linear", "striped")
        assert asked.ways == [By.DISCARD if is_plain else By.ZEROES]

        largest = client.capacity({"class": "linear"}).maximum_volume_size.value
        volume = client.create("all", largest, block(), parameters={"class": "linear"})
        assert SECRET[:16] not in contents(host, device(host, group, "vol-all"))
        client.delete(volume.volume_id)
