"""The Nodes that requests are about, and their cordons.

A Node that the evacuation cordons gets the annotation `evacuate.DRIVER/cordoned-for`: the name of
the Node whose request it is cordoned for. So an undo lifts these cordons, and no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.extras.evacuation import evacuation_request
from agent.extras.evacuation.evacuation_request import BadRequest, Kind, Request
from agent.extras.kubernetes.objects import NODES, Lists, Object, Objects

_RECORD = "record"


@dataclass(frozen=True)
class EvacuatedNode:
    """A Node; `request` is None without a request, `cordoned_for` empty without the annotation."""

    name: str
    is_schedulable: bool
    request: Request | BadRequest | None
    cordoned_for: str = ""
    is_ready: bool = True

    @property
    def problem(self) -> str:
        """Why no pod can be started on the node now, or for long; empty if one can."""
        if not self.is_ready:
            return "is not ready"
        if isinstance(self.request, Request) and self.request.kind is Kind.EVACUATE:
            return "is being evacuated itself"
        return "" if self.is_schedulable else "is cordoned"


class EvacuatedNodes:
    """Reads Nodes, and cordons them. Its methods wait for the API server.

    They raise ClusterRefused or ClusterSilent if it refuses or does not answer.
    """

    def __init__(self, lists: Lists, objects: Objects, driver_name: str) -> None:
        self._lists, self._objects, self._driver_name = lists, objects, driver_name
        self._cordon_key = f"evacuate.{driver_name}/cordoned-for"

    def read(self) -> Sequence[EvacuatedNode]:
        """Return all Nodes, in the order of their names."""

        def keep(item: Object) -> Object:
            return {_RECORD: self._node(item)}

        listing = self._lists.whole(NODES, "NodeList", keep=keep)
        return sorted((item[_RECORD] for item in listing.items), key=lambda node: node.name)

    def find(self, name: str) -> EvacuatedNode | None:
        """Return a Node as it is now; None if it does not exist."""
        item = self._objects.find(f"{NODES}/{name}", "Node")
        return None if item is None else self._node(item)

    def cordon(self, name: str, cordoned_for: str) -> None:
        """Let no further pods onto a Node, for the request of the Node `cordoned_for`."""
        self._mark(name, cordoned_for, is_cordoned=True)

    def uncordon(self, name: str) -> None:
        """Let pods onto a Node again."""
        self._mark(name, None, is_cordoned=False)

    def forget(self, name: str) -> None:
        """Remove the annotation of a cordon, and leave the cordon to the operator."""
        change = {"metadata": {"annotations": {self._cordon_key: None}}}
        self._objects.merge(f"{NODES}/{name}", change)

    def _mark(self, name: str, cordoned_for: str | None, *, is_cordoned: bool) -> None:
        # In a merge patch, null removes a field; the API server omits `unschedulable: false`.
        change = {
            "metadata": {"annotations": {self._cordon_key: cordoned_for}},
            "spec": {"unschedulable": is_cordoned or None},
        }
        self._objects.merge(f"{NODES}/{name}", change)

    def _node(self, item: Object) -> EvacuatedNode:
        annotations = item["metadata"].get("annotations") or {}
        return EvacuatedNode(
            str(item["metadata"]["name"]),
            not (item.get("spec") or {}).get("unschedulable"),
            evacuation_request.of(annotations, self._driver_name),
            str(annotations.get(self._cordon_key) or ""),
            is_ready(item),
        )


def is_ready(node: Object) -> bool:
    """Return whether a Node's condition Ready is true."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(
        (condition.get("type"), condition.get("status")) == ("Ready", "True")
        for condition in conditions
    )
