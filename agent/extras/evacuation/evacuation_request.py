"""The request to evacuate a node: an annotation on the Node object, and its JSON.

The key of the annotation is `evacuate.DRIVER/request`. Its value is one of

- `{"to": ["worker-2"], "force": true}`: evacuate the node; both keys are optional,
- `"stop"`: drive no move any more; what was begun stays as it is. Without the annotation the same,
- `"undo"`: take back what was not handed over, and move back what was.

So `kubectl annotate node NODE evacuate.DRIVER/request='{}'` begins an evacuation without Carver's
command.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from agent.core import errors
from agent.extras.kubernetes.objects import NODES, Objects, find_named
from agent.settings import values

# Maximum number of nodes in `to`, and of characters of the annotation that are read.
_MOST_NODES, _MOST_CHARACTERS = 1000, 64 << 10


class Kind(enum.StrEnum):
    """What a request asks for."""

    EVACUATE = "evacuate"
    STOP = "stop"
    UNDO = "undo"


class BadRequest(errors.AgentError):
    """Error: the annotation on a Node is no request."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the annotation is no request to evacuate: {why}")


@dataclass(frozen=True)
class Request:
    """A request about a node. `to` bounds the targets, `force` evicts pods without a controller."""

    kind: Kind = Kind.EVACUATE
    to: tuple[str, ...] = ()
    force: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the value of the annotation. Raises BadRequest if it is no request."""
        if len(text) > _MOST_CHARACTERS:
            raise BadRequest(f"it has more than {_MOST_CHARACTERS} characters")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise BadRequest(
                f"{text[:100]!r} is no JSON; write {{}} to evacuate to any node, or"
                ' {"to": ["NODE"]}, or "stop" or "undo" with their quotes'
            ) from None
        if value in ("stop", "undo"):
            return cls(Kind(value))
        if not isinstance(value, dict):
            raise BadRequest(f'{text[:100]!r} is neither an object nor "stop" nor "undo"')
        if unknown := sorted(value.keys() - {"to", "force"}):
            raise BadRequest(f"its key {unknown[0][:100]!r} is not known; it has `to` and `force`")
        to, force = value.get("to", []), value.get("force", False)
        if not isinstance(force, bool):
            raise BadRequest("`force` must be true or false")
        return cls(Kind.EVACUATE, checked_names(to), force)

    @property
    def text(self) -> str:
        """The value of the annotation."""
        if self.kind is not Kind.EVACUATE:
            return json.dumps(str(self.kind))
        value: dict[str, Any] = {"to": list(self.to)} if self.to else {}
        return json.dumps(value | ({"force": True} if self.force else {}))


def checked_names(to: object) -> tuple[str, ...]:
    """Return names of nodes without duplicates. Raises BadRequest if `to` is no list of names."""
    if not isinstance(to, list) or len(to) > _MOST_NODES:
        raise BadRequest(f"`to` must be a list of at most {_MOST_NODES} names of nodes")
    for name in to:
        try:
            values.parse_node_id(name if isinstance(name, str) else "")
        except ValueError:
            raise BadRequest(f"`to`: {str(name)[:100]!r} is no name of a node") from None
    return tuple(dict.fromkeys(to))


def key(driver_name: str) -> str:
    """Return the key of the annotation."""
    return f"evacuate.{driver_name}/request"


def of(annotations: Mapping[str, Any], driver_name: str) -> "Request | BadRequest | None":
    """Return the request in a Node's annotations; None without one, BadRequest for a wrong one."""
    text = annotations.get(key(driver_name))
    if text is None:
        return None
    try:
        return Request.parse(text if isinstance(text, str) else str(text))
    except BadRequest as error:
        return error


class NoSuchNode(errors.AgentError):
    """Error: the cluster has no Node of a name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the cluster has no node {name[:100]!r}")


class Annotations:
    """Writes requests to Nodes. Its methods wait for the API server, and raise ClusterRefused."""

    def __init__(self, objects: Objects, driver_name: str) -> None:
        self._objects, self.key = objects, key(driver_name)

    def require(self, *names: str) -> None:
        """Raise NoSuchNode for the first of these names that no Node has."""
        for name in names:
            if find_named(self._objects, NODES, name, "Node") is None:
                raise NoSuchNode(name)

    def write(self, node: str, request: Request | None) -> None:
        """Write the annotation of a Node; without a request, remove it.

        Raises NoSuchNode if there is no such Node.
        """
        self.require(node)
        change = {"metadata": {"annotations": {self.key: request.text if request else None}}}
        self._objects.merge(f"{NODES}/{node}", change)
