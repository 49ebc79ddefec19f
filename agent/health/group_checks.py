"""What is wrong with the groups that classes name: not here, not whole, or kept from this node."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent import errors
from agent.config.settings import Config
from agent.engine import sources
from agent.engine.disks import REMEDY
from agent.engine.sources import Foundations
from agent.health.verdicts import FAIL, PASS, WARN, Seen
from lvm import errors as lvm_errors
from lvm import filters, groups, lvm2, report
from lvm.command import Run
from lvm.report import Group, Report
from mount.syscalls import Kernel

# Above it the check of a group's metadata area warns; from 94 % on nothing new is made.
_NEARLY_FULL_PERCENT = 80


@dataclass(frozen=True)
class Node:
    """What the checks look at. `root` is where lvm2's own root directory is seen."""

    settings: Config
    kernel: Kernel
    run: Run
    known: Report
    # Of groups that the report lacks though they are here.
    refused: Mapping[str, errors.GroupRefused]
    # The disks that claim to be a group's and are not, each as a sentence.
    ignored: Mapping[str, Sequence[str]]
    root: Path


def every(node: Node) -> Iterator[Seen]:
    """What there is to say of each group; a command where filters or a devices file hide some."""
    listed = {one.group: one.devices for one in node.settings.foundations if one.devices}
    foundations = sources.Foundations(node.kernel, listed)
    unfiltered = _unfiltered(node)
    for name in node.settings.groups:
        group, whole = node.known.groups.get(name), unfiltered.get(name)
        if (refusal := node.refused.get(name)) is not None:
            yield FAIL, str(refusal), "as it says; its classes have no room here until then"
        elif whole is not None and (group is None or whole.missing_disks < group.missing_disks):
            yield _hidden(name, group, node.root)
        elif group is not None:
            yield from _present(node, foundations, group)
            for told in node.ignored.get(name, ()):
                yield WARN, f"volume group {name}: {told}", REMEDY
        elif name in listed:
            yield (
                WARN,
                f"volume group {name} is not there, which Carver makes of {', '.join(listed[name])}"
                " when it starts",
                "start it; if it did, its log says why the group could not be made",
            )
        else:
            yield (
                WARN,
                f"volume group {name} is not on this node, so its classes have no room here",
                "attach its disks (`pvs --all`), make it (`vgcreate --metadatasize 80m`), or"
                " correct the class",
            )


def _present(node: Node, foundations: Foundations, group: Group) -> Iterator[Seen]:
    name = group.name
    try:
        foundations.group(node.known, name)
    except errors.GroupRefused as error:
        yield FAIL, str(error), "`vgrename` that group, or correct the list"
        return
    for device in foundations.absent(group):
        yield (
            WARN,
            f"{device} is listed for volume group {name}, and is none of its disks",
            f"if nothing on it is needed, `vgextend {name} {device}`; else correct the list",
        )
    blocks = _blocks(node.kernel, group)
    if len(blocks) > 1:
        told = "; ".join(f"{size} bytes: {', '.join(blocks[size])}" for size in sorted(blocks))
        yield (
            WARN,
            f"volume group {name} has disks with logical blocks of several sizes ({told}): a file"
            " system that was made on the smaller ones may not be mounted once it lies on others",
            "move what is on one kind to the other (`pvmove`), and take that out (`vgreduce`)",
        )
    if group.missing_disks:
        yield (
            WARN,
            f"volume group {name} misses {group.missing_disks} of its disks",
            "attach them again, or see `A disk is replaced` in docs/operations.md",
        )
    else:
        fill = f"{groups.text_percent(group):.0f} %"
        told = f"is whole, with {len(group.disks)} disks; its metadata area is {fill} full"
        yield PASS, f"volume group {name} {told}", ""
    if groups.text_percent(group) >= _NEARLY_FULL_PERCENT:
        yield (
            WARN,
            f"the metadata area of volume group {name} is {groups.text_percent(group):.0f} % full:"
            " soon nothing new is made there",
            "delete volumes or snapshots, or see `A group's metadata area is full` in"
            " docs/operations.md",
        )


def _hidden(name: str, group: Group | None, root: Path) -> Seen:
    if (file := lvm2.devices_file(root)) is not None:
        listing = f"the node's devices file does not list (/{file.relative_to(root)})"
        remedy = f"`vgimportdevices {name}` on the node, if it shall be used; see lvmdevices(8)"
    else:
        listing = (
            "the filters in the node's lvm.conf reject (devices/filter, devices/global_filter)"
        )
        remedy = "correct the filter, or name the disks in the setting `devices`"
    if group is None:
        told = f"is on disks that {listing}, so lvm2 does not use it, and its classes have no room"
        return WARN, f"volume group {name} {told}", remedy
    return (
        WARN,
        f"volume group {name} misses {group.missing_disks} of its disks, some of which {listing}",
        remedy,
    )


def _blocks(kernel: Kernel, group: Group) -> Mapping[int, list[str]]:
    """The disks that are there, by the size of their logical blocks."""
    found: dict[int, list[str]] = {}
    for disk in group.disks:
        with suppress(OSError):
            found.setdefault(kernel.logical_block_bytes(disk.name), []).append(disk.name)
    return found


def _unfiltered(node: Node) -> Mapping[str, Group]:
    """The groups without the node's devices file and filters: a command, where it matters."""
    named = node.settings.groups
    there = [node.known.groups[one] for one in named if one in node.known.groups]
    is_well = len(there) == len(named) and not any(one.missing_disks for one in there)
    has_any = lvm2.devices_file(node.root) is not None or filters.read(node.root) is not None
    # `devices` outweighs both: they are not heeded then.
    if is_well or node.settings.devices or not has_any:
        return {}
    everything = ('devices/filter=["a|.*|"]', 'devices/global_filter=["a|.*|"]')
    settings = (*lvm2.without_udev(), "devices/use_devicesfile=0", *everything)
    try:
        return report.read(lvm2.Lvm(node.run, settings=settings)).groups
    except lvm_errors.LvmError:
        return {}
