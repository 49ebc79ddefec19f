"""Error codes of failed calls, by what the calls leave behind.

After a final code, a caller considers its call ended. If the claim, or the snapshot's object, is
deleted after a final code, no further call deletes what the failed call left behind. So an error
that would have a final code is raised as Unfinished (ABORTED) as long as something is left that
only the caller removes. The caller then repeats the call, which completes the volume or snapshot,
and deletes it by its id once it is not wanted.

The table in docs/decisions/34-failed-calls.md has for each call its final codes, what may be left
behind, and who removes it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from agent.core import codes, errors, ids, tag
from agent.core.ids import VolumeId
from agent.operations import plan
from agent.requests import requests
from agent.volumes import records, volume_states
from agent.volumes.context import Context
from agent.volumes.report_age import EveryGroup, Fresh
from lvm import names, report


class Leftovers:
    """Finds volumes and snapshots that failed calls left; runs no command after a success."""

    def __init__(self, context: Context) -> None:
        self._configuration = context.configuration
        self._volume_groups, self._reports = context.volume_groups, context.reports

    @contextmanager
    def of_volume(self, request: requests.CreateVolume) -> Iterator[None]:
        """Raise Unfinished for a final error of CreateVolume if its volume exists, or may exist.

        The call runs within the `with`. Unfinished is answered as ABORTED, so that the caller
        repeats the call. Errors after which the caller repeats the call anyway, or which are about
        the request, pass unchanged.
        """

        def left() -> bool:
            device_class = plan.device_class(
                self._configuration.now, "parameters", request.parameters
            )
            # Search all volume groups: the device class may have had another group when the volume
            # was created.
            all_groups = self._all_groups(device_class.group)
            logical_volumes = _callers(all_groups.groups.values())
            is_there = any(logical.name == request.own_name for logical in logical_volumes)
            if is_there:
                return True
            return bool(self._volume_groups.reason_unsure(all_groups.silent, request.own_name))

        with _unfinished(f"volume {request.name!r}", codes.ends_create_volume, left):
            yield

    @contextmanager
    def of_snapshot(self, request: requests.CreateSnapshot) -> Iterator[None]:
        """Raise Unfinished for a final error of CreateSnapshot if its snapshot exists or may exist.

        The call runs within the `with`. Unfinished is answered as ABORTED, so that the caller
        repeats the call. Errors after which the caller repeats the call anyway, or which are about
        the request, pass unchanged.
        """
        name = names.logical_volume(ids.SNAPSHOT_PREFIX, request.name)

        def left() -> bool:
            logical_volumes = self._logical({_group_of(request.source_id)})
            return any(
                logical.name == name and (logical.origin or logical.pool)
                for logical in logical_volumes
            )

        with _unfinished(f"snapshot {request.name!r}", codes.is_final, left):
            yield

    @contextmanager
    def of_group_snapshot(self, request: requests.CreateGroupSnapshot) -> Iterator[None]:
        """Raise Unfinished for a final error of CreateVolumeGroupSnapshot if all snapshots exist.

        Unfinished is also raised if the volume groups of the snapshots cannot be read. The call
        runs within the `with`. Unfinished is answered as ABORTED, so that the caller repeats the
        call. Errors after which the caller repeats the call anyway, or which are about the request,
        pass unchanged.
        """

        def left() -> bool:
            members = [
                logical.own_tags.get(tag.MEMBERS)
                for logical in self._logical(
                    {_group_of(source_id) for source_id in request.source_ids}
                )
                if tag.GROUP_SNAPSHOT in logical.own_tags
                and logical.own_tags[tag.NAME] == request.name
                and (logical.origin or logical.pool)
            ]
            return bool(members) and members[0] == str(len(members))

        with _unfinished(f"group snapshot {request.name!r}", codes.is_final, left):
            yield

    def _logical(self, groups: Collection[str]) -> Iterator[report.LogicalVolume]:
        """Yield the volumes and snapshots in named volume groups that failed calls may have left.

        The groups are read anew. The calls are CreateVolume, CreateSnapshot and
        CreateVolumeGroupSnapshot.
        """
        # Leave out the empty name, which `_group_of` returns as the volume group of a malformed id.
        groups = [name for name in groups if name]
        fresh_groups = self._reports.fresh(*groups).groups if groups else {}
        return _callers(fresh_groups[name] for name in groups if name in fresh_groups)

    def _all_groups(self, group: str) -> EveryGroup:
        """Return a report of all volume groups, read as CreateVolume reads them to find its volume.

        The state of the volume group `group` is fresh; a refused group is left out.
        """
        try:
            state = self._reports.fresh(group)
        except errors.GroupRefused:
            # Leave out a volume group that Carver refuses to use: its volumes belong to another
            # node or have no owner, and no call on this node creates or deletes them.
            state = Fresh({}, named_groups=frozenset({group}))
        return self._reports.every_group(state)


def _callers(groups: Iterable[report.Group]) -> Iterator[report.LogicalVolume]:
    """Yield the volumes and snapshots in these volume groups that failed calls may have left.

    The calls are CreateVolume, CreateSnapshot and CreateVolumeGroupSnapshot. Yields logical volumes
    that this version of Carver may change, in a state in which their caller deletes them.
    """
    for group in groups:
        for logical in records.usable_logical_volumes(group):
            is_callers = all(row.is_callers for row in volume_states.rows(logical.own_tags))
            if is_callers and tag.NAME in logical.own_tags:
                yield logical


def _group_of(identity: str) -> str:
    parsed = VolumeId.parse(identity)
    return "" if parsed is None else parsed.group


@contextmanager
def _unfinished(
    name: str, ends_calls: Callable[[Exception], bool], has_leftovers: Callable[[], bool]
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not ends_calls(error) or codes.is_of_request(error):
            raise
        try:
            is_left = has_leftovers()
        except errors.GroupRefused:
            # Count nothing in a volume group that Carver refuses to use as left for the caller: the
            # group's volumes belong to another node or have no owner, and no call on this node
            # creates or deletes them.
            is_left = False
        except Exception:
            # Assume that the failed call left something, since the groups could not be read. The
            # error of the call is raised, which says more than the error of reading.
            is_left = True
        if not is_left:
            raise
        raise errors.Unfinished(name, str(error) or type(error).__name__) from error
