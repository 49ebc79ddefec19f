"""Command lines of lvm2's, taken word by word."""

import itertools
from collections.abc import Sequence

from lvm.layout import Layout
from lvm.tuning import AUTO, Tuning


def settings_in(config: str) -> dict[str, str]:
    """lvm.conf(5) settings on the command line, such as `report/buffered=1 backup/backup=0`."""
    pairs = (one.split("=", 1) for one in config.split())
    return {key: value.strip('"') for key, value in pairs}


class Arguments:
    """Words of a command line, taken one by one; what is left over was not understood."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)

    def take(self, option: str) -> str:
        if option not in self._words:
            return ""
        at = self._words.index(option)
        value = self._words[at + 1]
        del self._words[at : at + 2]
        return value

    def take_all(self, option: str) -> list[str]:
        values = []
        while option in self._words:
            values.append(self.take(option))
        return values

    def has(self, option: str, value: str) -> bool:
        return (option, value) in itertools.pairwise(self._words)

    def value(self, option: str) -> str:
        """What an option says; it stays."""
        return self._words[self._words.index(option) + 1]

    def put(self, *words: str) -> None:
        """Words more."""
        self._words[:0] = words

    def given(self, option: str) -> bool:
        """Whether an option is there, also one that says nothing; it stays."""
        return option in self._words

    def flag(self, option: str) -> bool:
        if option not in self._words:
            return False
        self._words.remove(option)
        return True

    def skips_activation(self) -> bool:
        """Whether a new volume, active now, is not activated by itself later."""
        skipped = self.take("--setactivationskip") == "y"
        assert self.take("--activate") == "y"
        assert self.flag("--ignoreactivationskip") or not skipped
        return skipped

    def rest(self) -> list[str]:
        assert self._words[:1] == ["--"], f"not understood: {self._words}"
        rest, self._words = self._words[1:], []
        return rest

    def require_empty(self, words: Sequence[str]) -> None:
        assert not self._words, f"not understood: {self._words} in {' '.join(words)}"


def layout_in(arguments: Arguments) -> Layout:
    kind = arguments.take("--type")
    size = arguments.take("--stripesize")
    return Layout(
        kind,
        stripes=int(arguments.take("--stripes") or 1),
        mirrors=int(arguments.take("--mirrors") or 0),
        stripe_size_bytes=in_bytes(size) if size else 0,
    )


def tuning_in(arguments: Arguments) -> Tuning:
    """What options say of read-ahead, in sectors, and of recovery, in KiB."""
    ahead = arguments.take("--readahead")
    least, most = arguments.take("--minrecoveryrate"), arguments.take("--maxrecoveryrate")
    return Tuning(
        read_ahead_bytes=ahead if ahead == AUTO else int(ahead) * 512 if ahead else None,
        minimum_recovery_kib=int(least) if least else None,
        maximum_recovery_kib=int(most) if most else None,
    )


def in_bytes(size: str) -> int:
    assert size.endswith("b"), size
    return int(size.removesuffix("b"))
