"""Lists in parts: what ListVolumes and ListSnapshots answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from agent import errors
from agent.ids import VolumeId
from proto import csi_pb2 as csi

T = TypeVar("T")


@dataclass(frozen=True)
class Page:
    """Which part of a list; 0 entries sets no bound."""

    maximum_entries: int
    starting_token: str

    @classmethod
    def from_proto(cls, wire: csi.ListVolumesRequest | csi.ListSnapshotsRequest) -> Self:
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
    rest = [key for key in sorted(found) if key >= page.starting_token]
    end = page.maximum_entries or len(rest)
    return Part(tuple(found[key] for key in rest[:end]), "".join(rest[end : end + 1]))
