"""Unix sockets: whether one is stale, served, or still the same file."""

import socket
from pathlib import Path


def is_stale(path: Path) -> bool:
    """Whether the path is a socket that no process serves.

    Raises PermissionError where that is not known.
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
    """The device and inode of the file at a path; None where there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
