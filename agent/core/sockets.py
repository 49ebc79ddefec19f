"""Unix sockets: whether one was left by a process that ended, or is still the one that was made."""

import socket
from pathlib import Path


def is_stale(path: Path) -> bool:
    """Whether a socket lies there that no process serves; what is no socket is not stale.

    Raises PermissionError for who may not know.
    """
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            raise
        except OSError:
            return True
    return False


def is_served(path: Path) -> bool:
    """Whether a process answers at the socket."""
    return path.is_socket() and not is_stale(path)


def inode(path: Path) -> tuple[int, int] | None:
    """What tells the file at a path from another that is put there; None where there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
