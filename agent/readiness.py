"""Whether this node can do what it offers: what Probe tells, checked anew each time."""

from collections.abc import Callable
from pathlib import Path

from agent import errors
from agent.inventory import Inventory
from lvm import errors as lvm_errors
from lvm import report

_CONTROL = Path("/dev/mapper/control")


class Readiness:
    """Looks at lvm2, the groups and device-mapper."""

    def __init__(self, known: Inventory, control: Path = _CONTROL) -> None:
        self._inventory = known
        self._control = control

    def check(self) -> None:
        """Raise NotReady, with the reason, unless lvm2 runs and every group and dm are there.

        One command: the report needs lvm2, and names the groups. device-mapper is opened.
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
        try:
            # Opening the control node loads the driver's module where it is not loaded yet.
            with self._control.open("rb"):
                pass
        except OSError as error:
            raise errors.NotReady(
                f"device-mapper does not answer: {self._control}: {error.strerror}; is the dm_mod"
                " module loaded, and is /dev the host's?"
            ) from None
