"""What a failed call leaves behind, and so the code that its caller gets.

After a final code a caller takes a call for over. If the claim, or the snapshot's object, is
deleted then, no call deletes what this one left. So an error that would be final is answered as
Unfinished while something is left that only the caller removes: the caller repeats the call, which
completes it, and deletes it by its id once it is not wanted.

docs/decisions/34-failed-calls.md has the table: each call, its final codes, what may be left, and
whose it is.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from agent.core import codes, errors, ids, tag
from agent.core.ids import VolumeId
from agent.operations import plan
from agent.requests import requests
from agent.volumes import records, volume_states
from agent.volumes.context import Context
from agent.volumes.report_age import Every, Fresh
from lvm import names, report


class Leftovers:
    """Looks for what calls left that failed; no command where none fails."""

    def __init__(self, context: Context) -> None:
        self._configuration = context.configuration
        self._volume_groups, self._reports = context.volume_groups, context.reports

    @contextmanager
    def of_volume(self, call: requests.CreateVolume) -> Iterator[None]:
        """Raise Unfinished for what ends a CreateVolume within while its volume is there."""
        name = names.logical_volume(ids.VOLUME_PREFIX, call.name)

        def left() -> bool:
            one = plan.device_class(self._configuration.now, "parameters", call.parameters)
            # Wherever it is: the class may have had another group when the volume was made.
            every = self._every(one.group)
            found = _callers(every.groups.values())
            is_there = any(logical.name == name for logical in found)
            return is_there or bool(self._volume_groups.why_unsure(every.silent, name))

        with _unfinished(f"volume {call.name!r}", codes.ends_create_volume, left):
            yield

    @contextmanager
    def of_snapshot(self, call: requests.CreateSnapshot) -> Iterator[None]:
        """Raise Unfinished for what ends a CreateSnapshot within while its snapshot is there."""
        name = names.logical_volume(ids.SNAPSHOT_PREFIX, call.name)

        def left() -> bool:
            every = self._logical({_group_of(call.source_id)})
            return any(one.name == name and (one.origin or one.pool) for one in every)

        with _unfinished(f"snapshot {call.name!r}", codes.is_final, left):
            yield

    @contextmanager
    def of_group_snapshot(self, call: requests.CreateGroupSnapshot) -> Iterator[None]:
        """Raise Unfinished for what ends the call within while all its snapshots are there."""

        def left() -> bool:
            members = [
                one.own_tags.get(tag.MEMBERS)
                for one in self._logical({_group_of(one) for one in call.source_ids})
                if tag.GROUP_SNAPSHOT in one.own_tags
                and one.own_tags[tag.NAME] == call.name
                and (one.origin or one.pool)
            ]
            return bool(members) and members[0] == str(len(members))

        with _unfinished(f"group snapshot {call.name!r}", codes.is_final, left):
            yield

    def _logical(self, groups: Collection[str]) -> Iterator[report.LogicalVolume]:
        """What may be a caller's in these groups, by their fresh state."""
        # An id that can be none has no group.
        groups = [one for one in groups if one]
        known = self._reports.fresh(*groups).groups if groups else {}
        return _callers(known[one] for one in groups if one in known)

    def _every(self, group: str) -> Every:
        """All groups, as the call itself looks for its volume: this one by its fresh state."""
        try:
            known = self._reports.fresh(group)
        except errors.GroupRefused:
            # What is in it is another node's, or no one's: no call here comes by it.
            known = Fresh({}, asked=frozenset({group}))
        return self._reports.everywhere(known)


def _callers(groups: Iterable[report.Group]) -> Iterator[report.LogicalVolume]:
    """What may be a caller's in these groups: what this version may change, in such a state."""
    for group in groups:
        for one in records.usable(group):
            is_callers = all(row.is_callers for row in volume_states.rows(one.own_tags))
            if is_callers and tag.NAME in one.own_tags:
                yield one


def _group_of(identity: str) -> str:
    parsed = VolumeId.parse(identity)
    return "" if parsed is None else parsed.group


@contextmanager
def _unfinished(
    what: str, ends: Callable[[Exception], bool], left: Callable[[], bool]
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not ends(error) or codes.is_of_request(error):
            raise
        try:
            is_left = left()
        except errors.GroupRefused:
            # What is in it is another node's, or no one's: no call here comes by it.
            is_left = False
        except Exception:
            # Nothing is proved; the error itself says more.
            is_left = True
        if not is_left:
            raise
        raise errors.Unfinished(what, str(error) or type(error).__name__) from error
