"""A group that is not there when Carver starts, with work left in it."""

from faults.bench import Bench
from faults.outside import loop_file
from model import operations as do
from model.operations import MIB, Use

from agent.core import tag
from agent.csi.client import Client
from lvm import tags
from mount import loop

_BLOCK = Use("block", do.MULTI_WRITER)


def group_late(bench: Bench) -> tuple[int, str]:
    """A group comes after the start, with a deletion and a snapshot in it."""
    with bench.host() as host:
        group = host.new_group(40)
        ((_, (disk,)),) = host._groups
        file = loop_file(disk)
        with bench.served(host, group, 40) as trial:
            machine = trial.machine
            for name in ("a", "b"):
                trial.make(do.Create(name, 16 * MIB, 0, _BLOCK))
            snapshot = machine.client.snapshot("1", _id(machine.client, "a"))
            machine.stop()
            # As a kill leaves it, right after the deletion was put on record.
            (new,) = tags.encode({tag.STATE: tag.WIPING})
            (old,) = tags.encode({tag.STATE: tag.READY})
            host.lvm("lvchange", "--addtag", new, "--deltag", old, "--", f"{group}/vol-b")
            host.lvm("vgchange", "--activate", "n", "--", group)
            trial.model.deactivate("a")
            trial.model.apply(do.Delete("b"))
            loop.detach(host.kernel, disk)
            machine.start(machine.switch)
            for call in (do.Delete("a"), do.Get("a"), do.Volumes()):
                trial.refused(call, "FAILED_PRECONDITION", "UNAVAILABLE")
            trial.refused(do.Create("c", 16 * MIB, 0, _BLOCK), "RESOURCE_EXHAUSTED", "UNAVAILABLE")
            host.kernel.loop_configure(disk, file, read_only=False, direct_io=False, name=file)
            trial.patiently(do.Stage("a", "staging", _BLOCK))
            if [one.snapshot_id for one in machine.client.snapshots()] != [snapshot.snapshot_id]:
                trial.lost += 1
            machine.client.delete_snapshot(snapshot.snapshot_id)
            trial.compare()
            trial.patiently(do.Create("c", 16 * MIB, 0, _BLOCK))
    return 1, "refused until it comes; then the deletion goes on, and the rest is there"


def _id(client: Client, name: str) -> str:
    (found,) = [one for one in client.volumes() if one.volume_id.endswith(name)]
    return found.volume_id
