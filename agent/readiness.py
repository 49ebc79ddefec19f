"""Whether this node can do what it offers: what Probe tells, checked anew each time."""

from collections.abc import Callable

from agent import errors, preflight
from agent.inventory import Inventory
from lvm import errors as lvm_errors
from lvm import report


class Readiness:
    """Looks at lvm2, the groups, and what of the preflight costs nothing."""

    def __init__(self, known: Inventory, node: preflight.Node) -> None:
        self._inventory = known
        self._node = node

    def check(self) -> None:
        """Raise NotReady, with the reason, unless lvm2 runs and every group and the rest are there.

        One command: the report needs lvm2, and names the groups.
        """
        self._check(self._inventory.read)

    def check_recent(self) -> None:
        """The same for those who ask all day long: by a report that is at most a minute old."""
        self._check(lambda: self._inventory.recent()[0])

    def _check(self, read: Callable[[], report.Report]) -> None:
        try:
            self._inventory.require_groups(read())
        except lvm_errors.LvmError as error:
            raise errors.NotReady(str(error)) from None
        for found in preflight.cheap(self._node):
            if found.verdict == preflight.FAIL:
                raise errors.NotReady(f"{found.message}; {found.remedy}")
