"""Which volumes a group snapshot holds, and which must not be held."""

from collections.abc import Mapping

from agent import errors
from agent.engine.means import Means
from agent.engine.records import Volume
from lvm.devices import Device
from mount import loop, table


class Holding:
    """Chooses what is held; refuses what lvm2, or Carver itself, may have to do with."""

    def __init__(self, means: Means) -> None:
        self._config, self._kernel = means.config, means.kernel
        self._inventory = means.inventory

    def choose(self, volumes: list[Volume]) -> Mapping[str, Volume]:
        """Those that may be written to meanwhile, by their ids; a single one lvm2 holds itself."""
        if len(volumes) == 1:
            return {}
        mounts = table.read(self._kernel)
        held = {}
        for one in volumes:
            device = self._inventory.device(str(one.id))
            if device is not None:
                self._require_holdable(one, device, mounts)
                held[str(one.id)] = one
        return held

    def _require_holdable(self, volume: Volume, device: Device, mounts: table.Table) -> None:
        """Raise NotTogether where lvm2, or Carver itself, may have to do with what is held."""
        # lvm2 reads whatever may be a disk of a group, and would wait for this one.
        if loops := loop.over(self._kernel, device.number):
            raise errors.NotTogether(
                str(volume.id),
                f"{', '.join(loops)} shows it, as a raw block volume that is published read-only;"
                " lvm2 reads loop devices. Unpublish it there first",
            )
        if stacked := self._kernel.device_holders(device.path):
            raise errors.NotTogether(
                str(volume.id), f"{', '.join(stacked)} is made of it; take that away first"
            )
        if self._kernel.device_is_swap(device.path):
            raise errors.NotTogether(str(volume.id), "the kernel swaps to it")
        inside = [self._kernel.real_path(one) for one in self._config.kubelet_dir]
        files = self._config.foundations
        own = [self._config.endpoint.parent, *(one.file.path for one in files if one.file)]
        needed = {mounts.holding(self._kernel.real_path(str(one))) for one in own}
        for mount in mounts.of_device(device.number):
            if mount in needed or not any(_is_in(mount.path, one) for one in inside):
                raise errors.NotTogether(
                    str(volume.id),
                    f"it is mounted at {mount.path}, where Carver or lvm2 may have to write",
                )


def _is_in(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")
