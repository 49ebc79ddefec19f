"""Checks of Unix sockets: whether a socket is stale or served, and which file it is."""

import socket
from pathlib import Path


def is_stale(path: Path) -> bool:
    """Whether the path is a Unix socket that no process serves.

    Raises PermissionError if this process may not connect to the socket: whether a process serves
    the socket is then unknown.
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
    """Whether a process serves a Unix socket at the path. Raises PermissionError as `is_stale`."""
    return path.is_socket() and not is_stale(path)


def inode(path: Path) -> tuple[int, int] | None:
    """Return the device number and inode number of the file at a path; None if it is absent."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
