"""What udev makes of mounts: busy for a moment."""

import errno
import time

from mount.kernel import Kernel

_TRIES, _PAUSE_SECONDS = 100, 0.1


def unmount(kernel: Kernel, place: str) -> None:
    """Unmount, again and again while it is busy, as kubelet does.

    udev looks at each loop device that comes or goes, and the device keeps its file for as long.
    """
    for tried in range(1, _TRIES + 1):
        try:
            kernel.unmount(place)
        except OSError as error:
            if error.errno != errno.EBUSY or tried == _TRIES:
                raise
            time.sleep(_PAUSE_SECONDS)
        else:
            return
