"""The program `lvm`: which command is meant, whether it may be carried out, what it changed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fakes.lvm.arguments import Arguments, settings_in
from fakes.lvm.groups import GroupCommands
from fakes.lvm.records import Failure
from fakes.lvm.reports import Reports
from fakes.lvm.volumes import VolumeCommands

from lvm.tuning import SETTINGS
from mount.command import Result

# Options that each command takes.
_FOR_EACH_COMMAND = {"--config", "--devices", "--devicesfile", "--quiet", "--test", "--yes"}
# Commands that change nothing, and what lvchange changes but whether a volume is active.
_LOOKS = {"version", "fullreport", "--test", "--syncaction"}
# What no command adds to a group's text.
_NEAR_BYTES = 64 << 10
_CHANGES = {
    *("--addtag", "--deltag", "--permission", "--cachepolicy", "--cachesettings"),
    *(one.option for one in SETTINGS),
}


class FakeLvm(Reports, GroupCommands, VolumeCommands):
    """The program `lvm`, and the devices that its volumes have while they are active."""

    def __call__(self, words: Sequence[str]) -> Result:
        """Carry out `lvm SUBCOMMAND …`."""
        arguments = Arguments(words[2:])
        self._told.settings = {**self.conf, **settings_in(arguments.take("--config"))}
        self._told.devices = set(filter(None, arguments.take("--devices").split(","))) or None
        command: Callable[[Arguments], str] | None = getattr(self, f"_{words[1]}", None)
        assert command, f"the fake does not know: {' '.join(words)}"
        if self._told.settings.get("global/test") == "1" and not _LOOKS.intersection(words):
            return Result(0, "", "  TEST MODE: Metadata will NOT be updated\n")
        try:
            self._refuse_partial(words)
            self._refuse_without_change(words)
            with self._room_for_text():
                output = command(arguments)
        except Failure as failure:
            return Result(5, "", f"  {failure}\n")
        arguments.require_empty(words)
        self._commit(words)
        return Result(0, output, "")

    def _refuse_without_change(self, words: Sequence[str]) -> None:
        """lvm2 knows no command that names an object and says nothing of a change."""
        if words[1] in {"lvchange", "pvchange", "vgchange"}:
            options = words[2 : words.index("--")]
            if not any(one.startswith("--") and one not in _FOR_EACH_COMMAND for one in options):
                raise Failure("No command with matching syntax recognised.")

    def _refuse_partial(self, words: Sequence[str]) -> None:
        """While a disk is missing lvm2 changes little (handles_missing_pvs in its tools)."""
        unsafe = {"--cachepolicy", "--cachesettings", "--minrecoveryrate", "--maxrecoveryrate"}
        is_safe = (
            words[1] in {"version", "fullreport", "lvremove", "vgextend", "vgchange"}
            or (words[1] == "lvchange" and not unsafe.intersection(words))
            or (words[1] == "lvconvert" and "--repair" in words)
            or (words[1] == "vgreduce" and "--removemissing" in words)
        )
        named = () if is_safe else words[words.index("--") + 1 :]
        for group in self.groups.values():
            is_meant = any(one.partition("/")[0] == group.name for one in named)
            if is_meant and any(disk.missing for disk in group.disks):
                raise Failure(
                    f"Cannot change VG {group.name} while PVs are missing.\n"
                    "  See vgreduce --removemissing and vgextend --restoremissing."
                )

    @contextmanager
    def _room_for_text(self) -> Iterator[None]:
        """What does not fit into a group's metadata area is not committed."""
        groups = [one for one in self.groups.values() if one.metadata_free_bytes < _NEAR_BYTES]
        before = [{name: set(one.tags) for name, one in each.volumes.items()} for each in groups]
        free = [each.metadata_free_bytes for each in groups]
        yield
        for each, tags, was in zip(groups, before, free, strict=True):
            if each.metadata_free_bytes >= 0 or each.metadata_free_bytes >= was:
                continue
            for name in each.volumes.keys() - tags.keys():
                self._deactivate_one(each, each.volumes[name])
                del each.volumes[name]
            for name, one in each.volumes.items():
                one.tags = tags[name]
            raise Failure(f"VG {each.name} metadata exceeds maximum metadata size")

    def _commit(self, words: Sequence[str]) -> None:
        """Groups whose metadata a command that succeeded changed have them anew."""
        changed = not _LOOKS.intersection(words) and (
            words[1] != "lvchange" or _CHANGES.intersection(words)
        )
        if not changed:
            return
        named = words[words.index("--") + 1 :]
        names_of_groups = {word.partition("/")[0] for word in named}
        for group in self.groups.values():
            if group.name in names_of_groups or any(disk.name in named for disk in group.disks):
                group.seqno += 1
                if self._told.settings.get("backup/archive") == "1":
                    self._archive(group.name)

    def _archive(self, group: str) -> None:
        """Keep a copy of a group's metadata; of the others those that are new, and the last."""
        settings = self._told.settings
        directory = Path(settings["backup/archive_dir"])
        kept = sorted(directory.glob(f"{group}_*.vg"))
        (directory / f"{group}_{len(kept):05}-1.vg").touch()
        if settings.get("backup/retain_days") == "0":
            for old in kept[: max(0, len(kept) + 1 - int(settings["backup/retain_min"]))]:
                old.unlink()

    def _version(self, arguments: Arguments) -> str:
        return f"  LVM version:     {self.version}\n  Driver version:  4.47.0\n"
