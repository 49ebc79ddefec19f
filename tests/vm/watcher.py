"""A process that looks, as fast as it can, whether a path can be written, and counts its findings.

    watcher.py KIND PATH CONTROL

KIND is mount or block; PATH a file inside the volume, or where a raw block volume is published. The
directory or file that a volume is mounted at does not count. The first byte of the file CONTROL
says what to do, the second what is being done: wait, look or end.
"""

import errno
import fcntl
import json
import mmap
import os
import stat
import sys
import time
from collections import Counter
from pathlib import Path

WAIT, LOOK, END = b"w", b"l", b"e"
_BLKROGET = 0x125E  # linux/fs.h: whether the block device is read-only


def directory(path: str) -> str:
    """What a program finds that wants to write a file: nothing, read-only or writable."""
    try:
        os.close(os.open(path, os.O_WRONLY))
    except FileNotFoundError:
        return "nothing"
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return "read-only"
    return "writable"


def device(path: str) -> str:
    """The same of a raw block volume; opened for reading, for udev looks at what was written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return "nothing"
    try:
        if not stat.S_ISBLK(os.fstat(descriptor).st_mode):
            return "nothing"
        # A read-only bind of a device does not prevent writes; only the device itself does.
        answer = fcntl.ioctl(descriptor, _BLKROGET, bytes(4))
        return "read-only" if any(answer) else "writable"
    finally:
        os.close(descriptor)


def main() -> None:
    """Look on request; print the counts."""
    kind, path, control = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    look = {"mount": directory, "block": device}[kind]
    found: Counter[str] = Counter()
    with control.open("r+b") as file, mmap.mmap(file.fileno(), 2) as shared:
        while (now := shared[:1]) != END:
            shared[1:] = now
            if now == LOOK:
                found[look(path)] += 1
            else:
                time.sleep(0.001)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
