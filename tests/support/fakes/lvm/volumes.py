"""The commands for volumes: lvcreate, lvchange, lvextend, lvconvert, lvremove."""

from collections.abc import Sequence

from fakes.devices import BLOCK_BYTES, Media
from fakes.lvm import repairs
from fakes.lvm.allocation import allocatable, allocate, require_new, uncover
from fakes.lvm.arguments import Arguments, in_bytes, layout_in, tuning_in
from fakes.lvm.machine import data_node_of, node_of
from fakes.lvm.pools import PoolCommands
from fakes.lvm.records import (
    Failure,
    FakeGroup,
    FakePool,
    FakeThin,
    FakeVolume,
    is_lost,
    lost_ranges,
    ranges_of,
)

from lvm import report
from lvm.layout import Layout
from lvm.tuning import PLAIN, Tuning


class VolumeCommands(PoolCommands):
    """Carries out what changes a volume."""

    def _lvcreate(self, arguments: Arguments) -> str:
        assert arguments.flag("--yes")
        if arguments.has("--type", "snapshot"):
            return self._snapshot(arguments)
        if arguments.flag("--snapshot"):
            return self._thin_snapshot(arguments)
        if arguments.has("--type", "thin-pool"):
            return self._lvcreate_pool(arguments)
        if arguments.has("--type", "thin"):
            return self._lvcreate_thin(arguments)
        if arguments.has("--type", "cache") or arguments.has("--type", "writecache"):
            return self._lvcreate_cached(arguments)
        activate, test = arguments.take("--activate"), arguments.flag("--test")
        # What is not active cannot be wiped.
        wiped = (arguments.take("--wipesignatures"), arguments.take("--zero"))
        assert wiped == (activate, activate)
        skipped = arguments.take("--setactivationskip") == "y"
        assert arguments.flag("--ignoreactivationskip") or not skipped
        size, name = in_bytes(arguments.take("--size")), arguments.take("--name")
        tags, policy = set(arguments.take_all("--addtag")), arguments.take("--alloc")
        layout, tuning = layout_in(arguments), tuning_in(arguments).applied_to(PLAIN)
        if (tuning.minimum_recovery_kib or 0) > (tuning.maximum_recovery_kib or 0):
            # Also where no maximum is named.
            raise Failure("Minimum recovery rate cannot be higher than maximum.")
        group_name, *disks = arguments.rest()
        group = self._group(group_name)
        require_new(group, name)
        extents = -(-size // group.extent_size_bytes)
        volume = FakeVolume(name, self._uuid(), {}, tags, activation_skipped=skipped, layout=layout)
        volume.tuning = tuning
        allocate(group, volume, extents, disks, policy)
        uncover(group, volume, 0)
        # The first sectors are zeroed.
        volume.media.blocks.pop(0, None)
        if not test:
            group.volumes[name] = volume
            if activate == "y":
                self._activate(group, volume)
                self._require_active(group, volume)
        return f'  Logical volume "{name}" created.\n'

    def _require_active(self, group: FakeGroup, volume: FakeVolume) -> None:
        """A volume that cannot be wiped is removed again, unless nothing is active anyway."""
        if not volume.active and self._told.settings.get("global/activation") != "0":
            del group.volumes[volume.name]
            why = "is not active locally (volume_list activation filter?)."
            raise Failure(f"Volume {group.name}/{volume.name} {why}")

    def _lvcreate_cached(self, arguments: Arguments) -> str:
        """The volume, its cachevol, then both in one; undone where the cachevol does not fit."""
        kind, cache_size = arguments.take("--type"), arguments.take("--cachesize")
        fast = arguments.take_all("--cachedevice")
        group_name, name = arguments.value("--"), arguments.value("--name")
        arguments.put("--yes", "--type", "linear")
        self._lvcreate(arguments)
        group = self._group(group_name)
        volume = group.volumes[name]
        try:
            self._attach(group, volume, kind, self._cachevol(group, volume, cache_size, fast))
        except Failure:
            self.deactivate(group.name, name)
            del group.volumes[name]
            raise
        return f"  Logical volume {group.name}/{name} is now cached.\n"

    def _cachevol(
        self, group: FakeGroup, volume: FakeVolume, size: str, disks: Sequence[str]
    ) -> FakeVolume:
        made = FakeVolume(f"{volume.name}_cache", self._uuid(), {})
        require_new(group, made.name)
        assert disks, "no --cachedevice"
        allocate(group, made, -(-in_bytes(size) // group.extent_size_bytes), disks)
        return made

    @staticmethod
    def _attach(group: FakeGroup, volume: FakeVolume, kind: str, cache: FakeVolume) -> None:
        assert not volume.cache
        group.volumes.pop(cache.name, None)
        volume.cache, volume.cache_kind = cache, kind

    def _snapshot(self, arguments: Arguments) -> str:
        """A copy-on-write snapshot: its own extents are the area, its device is the origin's size.

        It is active whenever its origin is, whatever its own flags say.
        """
        assert arguments.take("--type") == "snapshot"
        read_only = arguments.take("--permission") == "r"
        skipped = arguments.take("--setactivationskip") == "y"
        assert arguments.take("--chunksize") == "4096b"
        size, name = in_bytes(arguments.take("--size")), arguments.take("--name")
        tags = set(arguments.take_all("--addtag"))
        path, *disks = arguments.rest()
        group, origin = self._found(path)
        assert not origin.origin, "Snapshots of snapshots are not supported."
        assert not origin.cache or origin.cache_kind == "writecache", "lvm2 would damage its data"
        require_new(group, name)
        area = FakeVolume(name, self._uuid(), {}, tags, activation_skipped=skipped)
        allocate(group, area, -(-size // group.extent_size_bytes), disks)
        area.read_only, area.origin, area.media = read_only, origin.name, origin.media.copy()
        group.volumes[name] = area
        if origin.active:
            self._activate_one(group, area)
            # lvm2 suspends it, unless it is, and resumes it.
            self.resume(group.name, origin.name)
        return f'  Logical volume "{name}" created.\n'

    def _lvconvert(self, arguments: Arguments) -> str:
        assert arguments.flag("--yes")
        if arguments.flag("--repair"):
            path, *disks = arguments.rest()
            return repairs.repair(self, *self._found(path), disks)
        if kind := arguments.take("--type"):
            if kind == "raid1":
                return self._lvconvert_to_raid1(arguments)
            return self._lvconvert_to_cached(arguments, kind)
        if arguments.flag("--splitcache"):
            (path,) = arguments.rest()
            group, volume = self._found(path.removesuffix("_tdata"))
            of_pool = isinstance(volume, FakePool)
            assert of_pool == path.endswith("_tdata"), 'lvm2: "Cannot find cache"'
            assert volume.cache, f"{volume.name} has no cache"
            assert volume.active, "what is in the cache cannot be written back"
            assert of_pool or not volume.dirty_blocks, "lvm2 would write it back under its lock"
            # What was written to the volume went through it.
            volume.cache.media.blocks |= dict(enumerate(volume.media.blocks.values()))
            group.volumes[volume.cache.name], volume.cache = volume.cache, None
            return ""
        assert arguments.flag("--splitsnapshot")
        group, volume = self._volume(arguments)
        assert volume.is_copy_on_write, f"{volume.name} is not a snapshot."
        if self._is_open(group, volume):
            raise Failure(f"Logical volume {group.name}/{volume.name} in use.")
        was_active = volume.active
        self._deactivate_one(group, volume)
        # What is in the area is no file system: chunks of the origin in the order of their copying.
        held = dict(enumerate(volume.media.blocks.values()))
        volume.origin, volume.media = "", Media(blocks=held)
        if was_active:
            self._activate_one(group, volume)
        return f"  Logical Volume {group.name}/{volume.name} split from its origin.\n"

    def _lvconvert_to_raid1(self, arguments: Arguments) -> str:
        """One image more, and metadata for both, on disks that lvm2 chooses."""
        mirrors = int(arguments.take("--mirrors"))
        group, volume = self._volume(arguments)
        assert volume.layout.is_linear, "not asked for so far"
        assert len(volume.extents) == 1, "not asked for so far"
        volume.layout, length = Layout("raid1", mirrors=mirrors), volume.length
        others = (one for one in allocatable(group) if one.name not in volume.extents)
        roomy = [one.name for one in others if group.free(one) > length][:mirrors]
        if len(roomy) < mirrors:
            raise Failure("Insufficient suitable allocatable extents")
        volume.extents = dict.fromkeys([*volume.extents, *roomy], length + 1)
        return f"  Logical volume {group.name}/{volume.name} successfully converted.\n"

    def _lvconvert_to_cached(self, arguments: Arguments, kind: str) -> str:
        cachevol, size = arguments.take("--cachevol"), arguments.take("--cachesize")
        fast = arguments.take_all("--cachedevice")
        group, volume = self._volume(arguments)
        if cachevol:
            cache = group.volumes[cachevol]
            self.deactivate(group.name, cachevol)
        else:
            cache = self._cachevol(group, volume, size, fast)
        self._attach(group, volume, kind, cache)
        return ""

    def _lvchange(self, arguments: Arguments) -> str:
        activate = arguments.take("--activate")
        ignored = arguments.flag("--ignoreactivationskip")
        removed, added = arguments.take_all("--deltag"), arguments.take_all("--addtag")
        permission, refreshed = arguments.take("--permission"), arguments.flag("--refresh")
        partial = arguments.take("--activationmode") == "partial"
        policy, settings = arguments.take("--cachepolicy"), arguments.take("--cachesettings")
        action = arguments.take("--syncaction")
        assert arguments.flag("--yes") == bool(policy or settings)
        tuning = tuning_in(arguments)
        path, *further = arguments.rest()
        if activate == "n" and (whole := report.visible_name(path)) != path:
            assert {report.visible_name(one) for one in further} <= {whole}, "not needed so far"
            self._found(whole)[1].left = ()
            return ""
        group, volume = self._found(path)
        assert not further or not (permission or refreshed), "not needed so far"
        assert not further or activate != "y", "not needed so far"
        for its_group, one in map(self._found, further):
            one.tags = (one.tags - set(removed)) | set(added)
            self._tune(its_group, one, tuning)
        self._tune(group, volume, tuning)
        if policy or settings:
            wanted = {"cache": ("cleaner", ""), "writecache": ("", "cleaner=1")}
            assert (policy, settings) == wanted[volume.cache_kind]
            volume.cleaning = True
        if refreshed:
            self.resume(group.name, volume.name)
            # It is brought in sync again, and so overwritten.
            volume.failed, volume.health = {}, volume.health.replace("refresh needed", "")
        if action:
            assert action == "repair"
            volume.health = volume.health.replace("mismatches exist", "")
        if permission:
            assert permission == "rw"
            if not volume.read_only:
                raise Failure(f'Logical volume "{group.name}/{volume.name}" is already writable.')
            volume.read_only = False
            if volume.active:
                self.devices.get(node_of(group.name, volume.name)).read_only = False
        volume.tags -= set(removed)
        volume.tags |= set(added)
        if activate == "n":
            self._deactivate_all(path, *further)
        elif activate:
            assert activate == "y"
            # "Change of snapshot will also change its origin. Proceed?"
            assert not volume.is_copy_on_write, "lvm2 would ask, and get no answer"
            if not partial and lost_ranges(group, volume):
                raise Failure(f"Refusing activation of partial LV {group.name}/{volume.name}.")
            if ignored or not volume.activation_skipped:
                self._activate(group, volume)
        return ""

    def _deactivate_all(self, *paths: str) -> None:
        """Deactivate what is not open; the rest is an error in the end."""
        refused: list[Failure] = []
        for group, volume in map(self._found, paths):
            try:
                self._refuse_open(group, volume)
                self.deactivate(group.name, volume.name)
            except Failure as failure:
                refused.append(failure)
        if refused:
            raise refused[0]

    def _tune(self, group: FakeGroup, volume: FakeVolume, tuning: Tuning) -> None:
        """All of it, or nothing."""
        path, ahead = f"{group.name}/{volume.name}", tuning.read_ahead_bytes
        if tuning.of_raid and not volume.layout.is_raid:
            raise Failure(f"Command on LV {path} uses options that require LV types raid .")
        if ahead is not None and self._snapshots(group, volume):
            raise Failure(
                f"Command on LV {path} uses options that are invalid with LV properties:"
                " lv_is_thick_origin ."
            )
        if ahead == volume.tuning.read_ahead_bytes:
            raise Failure(f"Read ahead is already {ahead} for {path}.")
        if tuning.applied_to(volume.tuning).refusal:
            raise Failure("Minimum recovery rate cannot be higher than maximum.")
        volume.tuning = tuning.applied_to(volume.tuning)

    def _lvextend(self, arguments: Arguments) -> str:
        if more := arguments.take("--poolmetadatasize"):
            return self._extend_metadata(arguments, in_bytes(more.removeprefix("+")))
        size, policy = in_bytes(arguments.take("--size")), arguments.take("--alloc")
        path, *disks = arguments.rest()
        group, volume = self._found(path)
        extents = -(-size // group.extent_size_bytes)
        if extents == volume.length:
            size_now = f"({extents} extents)"
            raise Failure(f"New size {size_now} matches existing size {size_now}.")
        assert extents > volume.length, "lvextend never shrinks"
        if volume.active and self._snapshots(group, volume):
            raise Failure(
                "Snapshot origin volumes can be resized only while inactive: try lvchange -an."
            )
        if isinstance(volume, FakeThin):
            volume.virtual_extents = extents
        else:
            # What is in it stays, and is a lesser part of it.
            volume.data_percent *= volume.length / extents
            before, had = volume.length, dict(volume.extents)
            named = {one for one in disks if ":" in one}
            disks = [one.partition(":")[0] for one in disks]
            allocate(group, volume, extents - volume.length, disks, policy)
            if not named or not named <= group.clean:
                uncover(group, volume, before, had)
            group.clean -= named
        if volume.active:
            self._watch(volume)
            shown = self._size(group, volume)
            self.devices.resize(node_of(group.name, volume.name), shown)
            if isinstance(volume, FakePool):
                self.devices.resize(data_node_of(group.name, volume.name), shown)
        return ""

    def _lvremove(self, arguments: Arguments) -> str:
        assert arguments.flag("--yes")
        forced = arguments.flag("--force") and arguments.flag("--force")
        if arguments.value("--").endswith("/lvol0_pmspare"):
            (path,) = arguments.rest()
            self._group(path.partition("/")[0]).spare.clear()
            return ""
        # With --yes the snapshots of an origin go with it, and with a pool what is in it.
        named = [self._found(path) for path in arguments.rest()]
        held = [(group, one) for group, it in named for one in (*group.thin(it.name), it)]
        for group, one in held:
            self._refuse_open(group, one)
        for group, one in held:
            self.deactivate(group.name, one.name)
            self._deactivate_one(group, one)
            for gone in (one, *self._snapshots(group, one)):
                del group.volumes[gone.name]
                self._free(group, gone)
            for image in [name for name in group.volumes if name.startswith(f"{one.name}_rmeta_")]:
                del group.volumes[image]
            for other in group.volumes.values():
                # A thin snapshot is whole without its origin.
                other.origin = "" if other.origin == one.name else other.origin
            if not any(isinstance(other, FakePool) for other in group.volumes.values()):
                group.spare.clear()
        for group, one in held:
            pool = group.volumes.get(one.pool) if isinstance(one, FakeThin) else None
            if isinstance(pool, FakePool) and is_lost(group, pool) and not forced:
                # It is gone from the metadata by then, and the pool has it still.
                raise Failure(f"Failed to update thin pool {group.name}/{pool.name}.")
        return ""

    @staticmethod
    def _free(group: FakeGroup, gone: FakeVolume) -> None:
        """What it held stays on its extents; of a thin one, in its pool."""
        if isinstance(gone, FakeThin):
            pool = group.volumes.get(gone.pool)
            if isinstance(pool, FakePool):
                pool.change()
                chunks = pool.length * group.extent_size_bytes // BLOCK_BYTES
                held = gone.media.blocks if gone.media.below is None else {}
                pool.media.blocks |= {number % chunks: data for number, data in held.items()}
                pool.chunks.is_full = False
        else:
            group.freed += [gone.media, *([gone.cache.media] if gone.cache else [])]
            if not gone.media.blocks:
                group.clean |= set(ranges_of(group, gone).split())
            group.freed += gone.failed.values()
            if gone.name == "sweep":
                group.swept += [(at, at + size) for at, size in gone.media.zeroed]
                for disk in gone.extents if not gone.media.blocks else ():
                    group.stale.pop(disk, None)
