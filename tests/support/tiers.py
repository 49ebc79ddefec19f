"""A group of two tiers: two slow disks, and two fast ones with the tag that says so."""

from real.any import AnyHost

from lvm import report

# In extents.
SLOW, FAST = (31, 17), (13, 9)


def new_group(host: AnyHost) -> str:
    name = host.new_group(*SLOW, *FAST)
    disks = report.read(host.lvm).group(name).disks
    fast = [disk.name for disk in disks if disk.extents in FAST]
    host.lvm("pvchange", "--addtag", report.FAST, "--", *fast)
    return name


def free(host: AnyHost, group: str) -> tuple[int, int]:
    """The free extents of the slow tier and of the fast one."""
    now = report.read(host.lvm).group(group)
    return now.free_extents, now.fast_free_extents
