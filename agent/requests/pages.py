"""Lists in parts: what ListVolumes, ListSnapshots and ControllerListVolumeHealth answer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from agent import errors
from agent.ids import VolumeId
from proto import csi_pb2 as csi

T = TypeVar("T")

# gRPC in Go takes 4 MiB in one message where nothing else is said. A caller that sets no bound
# accepts any number of entries (CSI spec), so it may be given a part.
_MOST_ENTRIES = 2000
_MOST_BYTES = 2 << 20


@dataclass(frozen=True)
class Page:
    """Which part of a list; 0 entries sets no bound but what one message may have."""

    maximum_entries: int
    starting_token: str

    @classmethod
    def from_proto(
        cls,
        wire: csi.ListVolumesRequest
        | csi.ListSnapshotsRequest
        | csi.ControllerListVolumeHealthRequest,
    ) -> Self:
        """Read and check the request."""
        if wire.max_entries < 0:
            raise errors.BadField("max_entries", "must not be negative")
        return cls(wire.max_entries, wire.starting_token)


@dataclass(frozen=True)
class Part(Generic[T]):
    """A part of a list, and the token for the next part, if there is one."""

    entries: tuple[T, ...]
    next_token: str


def check(page: Page) -> None:
    """Raise BadToken for a token that no `part` can have given out."""
    if page.starting_token and VolumeId.parse(page.starting_token) is None:
        raise errors.BadToken(page.starting_token)


def part(found: Mapping[str, T], page: Page) -> Part[T]:
    """The part that a call asks for, in the order of the ids that are the keys.

    The token is the id to begin with, so what comes or goes meanwhile does no harm.
    """
    rest = [(key, found[key]) for key in sorted(found) if key >= page.starting_token]
    return first(rest, page)


def first(
    rest: Iterable[tuple[str, T]], page: Page, weigh_bytes: Callable[[T], int] = lambda _: 0
) -> Part[T]:
    """The same of what comes in that order, from the token on; no more of it is asked for.

    `weigh_bytes` is how much of a message an entry takes, where that may be much.
    """
    most = min(page.maximum_entries or _MOST_ENTRIES, _MOST_ENTRIES)
    entries: list[T] = []
    size_bytes = 0
    for key, one in rest:
        size_bytes += weigh_bytes(one)
        if len(entries) == most or (entries and size_bytes > _MOST_BYTES):
            return Part(tuple(entries), key)
        entries.append(one)
    return Part(tuple(entries), "")
