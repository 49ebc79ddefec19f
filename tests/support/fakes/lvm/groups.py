"""The commands for groups and disks: vgcreate to vgremove, pvchange, pvmove; renaming."""

from collections.abc import Iterator
from contextlib import contextmanager

from fakes.lvm import repairs
from fakes.lvm.arguments import Arguments, in_bytes
from fakes.lvm.machine import LABEL, Machine
from fakes.lvm.records import LABEL_BYTES, METADATA_BYTES, Failure, FakeDisk, FakeGroup, FakeVolume

from mount.filesystem import Signature


class GroupCommands(Machine):
    """Carries out what changes a group."""

    def _vgcreate(self, arguments: Arguments) -> str:
        assert arguments.flag("--quiet")
        assert arguments.flag("--quiet")
        metadata_bytes = _metadata_bytes(arguments)
        tags = set(arguments.take_all("--addtag"))
        name, *paths = arguments.rest()
        if name in self.groups:
            raise Failure(f"A volume group called {name} already exists.")
        extent = 4 << 20
        disks = [self._labelled(path, extent, metadata_bytes) for path in paths]
        self.groups[name] = FakeGroup(name, self._uuid(), extent, disks, tags)
        return f'  Volume group "{name}" successfully created\n'

    def _labelled(self, path: str, extent_size_bytes: int, metadata_bytes: int) -> FakeDisk:
        """A disk that becomes one of a group's."""
        device = self.devices.get(path)
        assert device.contents is None or device.contents.fs_type == LABEL, "not blank"
        device.contents = Signature(LABEL, "raid", self._uuid())
        made = FakeDisk(path, self._uuid(), 0, metadata_bytes=metadata_bytes)
        made.extents = (device.size_bytes - made.pe_start_bytes) // extent_size_bytes
        return made

    def _pvmove(self, arguments: Arguments) -> str:
        if arguments.flag("--abort"):
            assert not arguments.rest()
            return repairs.abort(self)
        assert arguments.flag("--background"), "it would wait for hours"
        assert self._told.settings["global/use_lvmpolld"] == "0", "that would look at all disks"
        disks = arguments.rest()
        return repairs.move(self, *disks) if disks else ""

    def _vgchange(self, arguments: Arguments) -> str:
        removed, added = arguments.take_all("--deltag"), arguments.take_all("--addtag")
        is_sure = arguments.flag("--yes")
        if arguments.given("--lock-type"):
            return self._unshare(arguments)
        is_given, system_id = arguments.given("--systemid"), arguments.take("--systemid")
        is_limited, most = arguments.given("--logicalvolume"), arguments.take("--logicalvolume")
        has_policy, policy = arguments.given("--alloc"), arguments.take("--alloc")
        has_new_uuid, activate = arguments.flag("--uuid"), arguments.take("--activate")
        (name,) = arguments.rest()
        group = self._group(name)
        if activate:
            assert activate == "n", "what is to be active is activated by itself"
            for one in [one for one in group.volumes.values() if one.active]:
                self._deactivate_one(group, one)
        if has_new_uuid:
            if any(one.active for one in group.volumes.values()):
                raise Failure("Volume group has active logical volumes.")
            group.uuid = self._uuid()
        group.tags = (group.tags - set(removed)) | set(added)
        if is_limited:
            group.max_lv = int(most)
        if has_policy:
            group.policy = policy
        if is_given:
            assert is_sure, "lvm2 would ask"
            group.system_id = system_id
        return ""

    def _unshare(self, arguments: Arguments) -> str:
        """lvmlockd(8): by force, without one; lvm2 2.03.31 must be told to use one all the same."""
        assert arguments.take("--lock-type") == "none"
        is_forced = arguments.take("--lockopt") == "force"
        (name,) = arguments.rest()
        if is_forced and self._told.settings.get("global/use_lvmlockd") == "1":
            self.groups[name].lock_type = ""
        # It fails with success: "Using lock type requires lvmlockd."
        return ""

    def _vgexport(self, arguments: Arguments) -> str:
        (name,) = arguments.rest()
        group = self._group(name)
        if any(one.active for one in group.volumes.values()):
            raise Failure(f'Volume group "{name}" has active logical volumes')
        group.exported, group.system_id = True, ""
        return ""

    def _vgimport(self, arguments: Arguments) -> str:
        (name,) = arguments.rest()
        group = self.groups[name]
        if not group.exported:
            raise Failure(f'Volume group "{name}" is not exported')
        group.exported, group.system_id = False, self.system_id
        return ""

    def _vgremove(self, arguments: Arguments) -> str:
        assert arguments.flag("--yes")
        (name,) = arguments.rest()
        group = self._group(name)
        assert not group.volumes, "it would remove them too"
        del self.groups[name]
        for disk in group.disks:
            self._unlabel(disk)
        return ""

    def _lvrename(self, arguments: Arguments) -> str:
        name, old, new = arguments.rest()
        group = self._group(name)
        if new in group.volumes:
            raise Failure(f'Logical volume "{new}" already exists in volume group "{name}"')
        volume = group.volumes.pop(old)
        with self._renamed(group, volume):
            volume.name = new
        group.volumes[new] = volume
        for one in group.volumes.values():
            if one.origin == old:
                one.origin = new
        return ""

    def _vgrename(self, arguments: Arguments) -> str:
        old, new = arguments.rest()
        group = self._group(old)
        with self._renamed(group, *group.volumes.values()):
            del self.groups[old]
            group.name = new
            self.groups[new] = group
        # By its old name it is not found when it is committed.
        group.seqno += 1
        return ""

    @contextmanager
    def _renamed(self, group: FakeGroup, *those: FakeVolume) -> Iterator[None]:
        """What is active has its device under the new name."""
        active = [one for one in those if one.active]
        for one in active:
            self._deactivate_one(group, one)
        yield
        for one in active:
            self._activate_one(group, one)

    def _vgextend(self, arguments: Arguments) -> str:
        while arguments.flag("--quiet"):
            pass
        size = _metadata_bytes(arguments)
        name, *paths = arguments.rest()
        group = self._group(name)
        group.disks += [self._labelled(path, group.extent_size_bytes, size) for path in paths]
        return ""

    def _vgreduce(self, arguments: Arguments) -> str:
        if arguments.flag("--removemissing"):
            (name,) = arguments.rest()
            return repairs.reduce_missing(self._group(name))
        name, *paths = arguments.rest()
        group = self._group(name)
        for disk in [one for one in group.disks if one.name in paths]:
            if group.free(disk) < disk.extents:
                raise Failure(f'Physical volume "{disk.name}" still in use')
            group.disks.remove(disk)
            self._unlabel(disk)
        return ""

    def _unlabel(self, disk: FakeDisk) -> None:
        """It stays lvm2's, in no group."""
        if self.devices.knows(disk.name):
            self.devices.get(disk.name).contents = Signature(LABEL, "raid", disk.uuid)

    def _pvchange(self, arguments: Arguments) -> str:
        allocatable = arguments.take("--allocatable")
        tags, gone = arguments.take_all("--addtag"), arguments.take_all("--deltag")
        chosen = arguments.rest()
        for group in self.groups.values():
            for disk in group.disks:
                if disk.name in chosen:
                    disk.allocatable = allocatable == "y" if allocatable else disk.allocatable
                    disk.tags = (disk.tags - set(gone)) | set(tags)
        return ""


def _metadata_bytes(arguments: Arguments) -> int:
    """The size of a disk's metadata area; what lvm2 would round to is given as it is."""
    asked = arguments.take("--metadatasize")
    if asked.endswith("m"):
        # As people say it; lvm2 rounds it up to where the first extent begins.
        return (int(asked.removesuffix("m")) + 1 << 20) - LABEL_BYTES
    size = in_bytes(asked) if asked else METADATA_BYTES
    assert (LABEL_BYTES + size) % (1 << 20) == 0, size
    return size
