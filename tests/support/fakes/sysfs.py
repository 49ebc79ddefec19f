"""Trees of block devices as sysfs has them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lvm.candidate_devices import BlockDevices, Excluded

LVM = "LVM-" + "g" * 32 + "v" * 32
# The UUID of the group in that, as lvm2 writes it.
GROUP_OF_VOLUMES = "gggggg-gggg-gggg-gggg-gggg-gggg-gggggg"


@dataclass(frozen=True)
class Sysfs:
    """A tree of sysfs, made in a directory."""

    root: Path

    def add(
        self,
        name: str,
        number: str,
        *,
        on: tuple[str, ...] = (),
        disk: str = "",
        size: str = "8192",
        above: str = "pci0/block",
        **more: str,
    ) -> None:
        """A device; what it stands on bears it as a holder. `more` are files: dm__uuid."""
        place = (self._place(disk) if disk else self.root / "devices" / above) / name
        for one in ("slaves", "holders"):
            (place / one).mkdir(parents=True)
        for file, text in {"dev": number, "size": size, **more}.items():
            path = place / file.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{text}\n")
        if disk:
            (place / "partition").write_text("1\n")
        links = self.root / "class/block"
        links.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(os.path.relpath(place, links))
        for one in on:
            (place / "slaves" / one).symlink_to(self._place(one))
            (self._place(one) / "holders" / name).symlink_to(place)

    def volume(self, name: str, number: str, *on: str) -> None:
        """A logical volume."""
        self.add(name, number, on=on, dm__uuid=LVM, dm__name=f"data-{name}")

    def excluded(self, **backings: int) -> Mapping[str, Excluded]:
        """What may be no physical volume."""
        return BlockDevices(self.root).excluded(backings)

    def _place(self, name: str) -> Path:
        return (self.root / "class/block" / name).resolve()
