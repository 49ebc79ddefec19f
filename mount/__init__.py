"""The kernel: programs, block devices, mounts, file systems, LUKS headers. No LVM, no policy."""
