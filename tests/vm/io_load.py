"""In a pod: read or write a part of a file, or of a device, over and over until killed.

`io_load.py PATH read|write direct|buffered BYTES STRIDE OFFSET LENGTH`: so many bytes at each
stride. A stride of more than the bytes keeps the kernel from merging them. Prints a line before the
first.
"""

import mmap
import os
import sys


def main() -> None:
    """Never returns."""
    path, deed, how, *numbers = sys.argv[1:]
    size, stride, start, length = map(int, numbers)
    flags = os.O_RDWR | (os.O_DIRECT if how == "direct" else 0)
    descriptor = os.open(path, flags)
    if stride > size:
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_RANDOM)
    # Aligned, as O_DIRECT needs it.
    buffer = mmap.mmap(-1, size)
    buffer.write(os.urandom(size))
    print("ready", flush=True)
    while True:
        if deed == "read":
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
        for offset in range(start, start + length - size + 1, stride):
            if deed == "read":
                os.preadv(descriptor, [buffer], offset)
            else:
                os.pwrite(descriptor, buffer, offset)


if __name__ == "__main__":
    main()
