"""What kubelet itself makes and keeps in its directory around the calls to a driver."""

from dataclasses import dataclass, field
from pathlib import Path

from fakes import kubelet
from real import mounts

from mount import loop, mount_errors
from mount.kernel import Kernel


@dataclass(frozen=True)
class Directories:
    """Kubelet's directory on one node, and the kernel it works with."""

    kubelet: Path
    kernel: Kernel
    # Its loop devices, by the files that they are over.
    _loops: dict[Path, str] = field(default_factory=dict)

    def prepare(self, path: Path | str) -> None:
        """Have a directory, as kubelet does for what it stages at, and above what it publishes."""
        Path(path).mkdir(parents=True, exist_ok=True)

    def remove(self, path: Path | str) -> None:
        """Remove a directory after the driver is done with it; what a driver left there stays."""
        place = Path(path)
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()

    def take(self, published: str) -> None:
        """Keep a raw block volume, as kubelet does while a pod has it.

        It binds what was published to a file of its own and has a loop device, a writable one,
        over that (kubernetes `pkg/volume/util/util.go` MapBlockVolume).
        """
        own = self._own(published)
        if own in self._loops:
            return
        own.parent.mkdir(parents=True, exist_ok=True)
        own.touch()
        self.kernel.bind(published, str(own), frozenset())
        self._loops[own] = kubelet.hold(self.kernel, own)

    def release(self, published: str) -> bool:
        """Let go of a raw block volume, before it is unpublished (UnmapBlockVolume).

        False where its loop device has another user yet, as udev is for seconds on a slow machine:
        kubelet tries again later.
        """
        own = self._own(published)
        if (device := self._loops.get(own)) is None:
            return True
        try:
            loop.detach(self.kernel, device)
        except mount_errors.Busy:
            return False
        del self._loops[own]
        mounts.unmount(self.kernel, str(own))
        own.unlink()
        return True

    def forget(self) -> None:
        """The node was off: nothing is bound and attached any more."""
        for device in self._loops.values():
            loop.detach(self.kernel, device)
        for own in self._loops:
            mounts.unmount(self.kernel, str(own))
            own.unlink()
        self._loops.clear()

    @staticmethod
    def _own(published: str) -> Path:
        """`…/volumeDevices/publish/<pv>/<pod>` is kept at `…/volumeDevices/<pv>/dev/<pod>`."""
        path = Path(published)
        return path.parents[2] / path.parent.name / "dev" / path.name
