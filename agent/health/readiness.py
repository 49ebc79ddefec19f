"""Whether this node can do what it offers: what Probe and `/readyz` tell."""

from agent import errors
from agent.admission import Admission
from agent.engine.inventory import Inventory
from agent.health import preflight, verdicts
from lvm import errors as lvm_errors


class Readiness:
    """Looks at what of the preflight costs nothing, and at what lvm2 said when it was asked last.

    A group that is not here makes no node unready: it has no room for its classes, and that says it
    all. Others are served, and sidecars end for good where Probe fails.
    """

    def __init__(self, known: Inventory, node: preflight.Node, admission: Admission) -> None:
        self._inventory = known
        self._node = node
        self._admission = admission

    def probe(self) -> bool:
        """Whether the start is over; raises NotReady where nothing can be served. No command."""
        for found in preflight.cheap(self._node):
            if found.verdict == verdicts.FAIL:
                raise errors.NotReady(f"{found.message}; {found.remedy}")
        for problem in (self._admission.problem, self._inventory.problem):
            if isinstance(problem, lvm_errors.ProgramMissing):
                raise errors.NotReady(str(problem))
        return self._admission.is_open

    def check(self) -> None:
        """Raise NotReady, with the reason, unless lvm2 answers and nothing of the rest lacks.

        By a report that is at most a minute old: for those who ask all day long.
        """
        self.probe()
        try:
            self._admission.require_open()
            self._inventory.recent()
        except (errors.AgentError, lvm_errors.LvmError) as error:
            raise errors.NotReady(str(error)) from None
