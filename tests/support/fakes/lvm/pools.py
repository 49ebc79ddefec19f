"""The commands for thin pools and what is in them."""

from fakes.lvm.allocation import allocatable, append, missing_spare, require_free, require_new
from fakes.lvm.arguments import Arguments, in_bytes, tuning_in
from fakes.lvm.kernel import KernelSide
from fakes.lvm.records import Failure, FakePool, FakeThin

from lvm.layout import Layout
from lvm.tuning import PLAIN


class PoolCommands(KernelSide):
    """Carries out what makes pools and thin volumes."""

    def _thin_snapshot(self, arguments: Arguments) -> str:
        """A volume that shares a pool with its origin, and is whole without it."""
        read_only = arguments.take("--permission") == "r"
        assert arguments.take("--setactivationskip") == "y"
        activate = arguments.take("--activate")
        assert arguments.flag("--ignoreactivationskip") == (activate == "y")
        name, tags = arguments.take("--name"), set(arguments.take_all("--addtag"))
        tuning = tuning_in(arguments).applied_to(PLAIN)
        group, origin = self._volume(arguments)
        require_new(group, name)
        assert isinstance(origin, FakeThin), "lvm2 would ask for a size"
        within = group.volumes[origin.pool]
        assert isinstance(within, FakePool)
        # lvm2 2.03.16 says yes, and does not tell the pool: it takes no more volumes afterwards.
        assert not self.is_suspended(group.name, origin.name), "the pool would be damaged"
        made = FakeThin(
            *(name, self._uuid(), {}, tags),
            activation_skipped=True,
            layout=origin.layout,
            media=origin.media.copy(),
            read_only=read_only,
            origin=origin.name,
            # Its origin's is not inherited.
            tuning=tuning,
            virtual_extents=origin.virtual_extents,
            pool=origin.pool,
            number=next(self._numbers),
            transaction=within.change(),
        )
        group.volumes[name] = made
        if activate:
            self._activate(group, made)
        return f'  Logical volume "{name}" created.\n'

    def _lvcreate_pool(self, arguments: Arguments) -> str:
        assert arguments.take("--type") == "thin-pool"
        assert (arguments.take("--zero"), arguments.take("--discards")) == ("y", "passdown")
        # In what earlier versions said.
        assert arguments.take("--monitor") in ("", "n")
        skipped = arguments.skips_activation()
        chunk = in_bytes(arguments.take("--chunksize"))
        metadata, size = (in_bytes(arguments.take(one)) for one in ("--poolmetadatasize", "--size"))
        name, tags = arguments.take("--name"), set(arguments.take_all("--addtag"))
        group_name, *disks = arguments.rest()
        group = self._group(group_name)
        require_new(group, name)
        assert metadata >= 2 << 20, "lvm2 would round that up by itself"
        assert size >= chunk, "lvm2 refuses a pool of less than a chunk"
        extents, of_metadata = (-(-one // group.extent_size_bytes) for one in (size, metadata))
        pool = FakePool(
            *(name, self._uuid(), {}, tags), activation_skipped=skipped, chunk_size_bytes=chunk
        )
        usable = allocatable(group, disks)
        missing = missing_spare(group, of_metadata)
        # In one piece, on one disk.
        roomiest = max(usable, key=group.free)
        require_free(group, extents + of_metadata + missing, usable)
        require_free(group, of_metadata, [roomiest])
        group.volumes[name] = pool
        append(group, pool.metadata, of_metadata, [roomiest])
        append(group, pool.extents, extents, usable)
        append(group, group.spare, missing, usable)
        self._activate(group, pool)
        return f'  Logical volume "{name}" created.\n'

    def _lvcreate_thin(self, arguments: Arguments) -> str:
        assert arguments.take("--type") == "thin"
        skipped = arguments.skips_activation()
        size = in_bytes(arguments.take("--virtualsize"))
        pool, name = arguments.take("--thinpool"), arguments.take("--name")
        tags, tuning = set(arguments.take_all("--addtag")), tuning_in(arguments).applied_to(PLAIN)
        (group_name,) = arguments.rest()
        group = self._group(group_name)
        require_new(group, name)
        within = group.volumes.get(pool)
        if not isinstance(within, FakePool):
            raise Failure(f"Thin pool {group_name}/{pool} not found.")
        volume = FakeThin(
            *(name, self._uuid(), {}, tags),
            activation_skipped=skipped,
            layout=Layout("thin"),
            tuning=tuning,
            virtual_extents=-(-size // group.extent_size_bytes),
            pool=pool,
            number=next(self._numbers),
            transaction=within.change(),
        )
        if name.startswith("wipe-"):
            size = within.length * group.extent_size_bytes
            within.chunks.begin(within.media, within.chunk_size_bytes, size)
            volume.media.below = within.chunks
        group.volumes[name] = volume
        self._activate(group, volume)
        return f'  Logical volume "{name}" created.\n'

    def _extend_metadata(self, arguments: Arguments, more_bytes: int) -> str:
        path, *disks = arguments.rest()
        group, pool = self._found(path)
        usable = allocatable(group, disks)
        assert isinstance(pool, FakePool)
        more = -(-more_bytes // group.extent_size_bytes)
        missing = missing_spare(group, sum(pool.metadata.values()) + more)
        require_free(group, more + missing, usable)
        append(group, pool.metadata, more, usable)
        append(group, group.spare, missing, usable)
        return ""
