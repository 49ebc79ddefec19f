"""A node's socket, as its callers see it: every answer is kept, with what its caller does then."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from callers import rules
from callers.rules import Reaction, Rule

from agent.csi.client import Client
from proto import csi_pb2 as csi

# Kubelet's is two minutes (csiTimeout), the sidecars' --timeout of the manifests is one.
_TIMEOUT_SECONDS = 60

_SERVICES = {"Identity": "identity", "Controller": "controller", "Node": "node"} | {
    "GroupController": "group_controller"
}
# The stub that has a method, and the type of its request.
METHODS: dict[str, tuple[str, Any]] = {
    method.name: (stub, getattr(csi, method.input_type.name))
    for service, stub in _SERVICES.items()
    for method in csi.DESCRIPTOR.services_by_name[service].methods
}


@dataclass(frozen=True)
class Answer:
    """What a call ended with."""

    rule: Rule
    request: Any
    code: str
    message: str = ""
    response: Any = None

    @property
    def reaction(self) -> Reaction:
        return self.rule.reaction(self.code)

    @property
    def is_warned_of(self) -> bool:
        """Whether a Warning event tells people of it."""
        return self.code != "OK" and bool(self.rule.warning)

    def __str__(self) -> str:
        what = f"{self.rule.caller} {self.rule.method} {self.code}: {self.message}"
        return f"{what} {{{str(self.request).replace(chr(10), ' ')}}}"


class Plugin:
    """The driver on one node. `seen` gets every answer."""

    def __init__(self, client: Client, seen: Callable[[Answer], object]) -> None:
        # Another one once the driver was started anew.
        self.client = client
        self._seen = seen

    def ask(self, method: str, request: Any = None, caller: str = "") -> Answer:
        """Make a call, as its usual caller or as the one that is named."""
        stub, kind = METHODS[method]
        request = kind() if request is None else request
        rule = rules.of(method, caller)
        call = getattr(getattr(self.client, stub), method)
        try:
            response = call(request, timeout=_TIMEOUT_SECONDS)
            answer = Answer(rule, request, "OK", response=response)
        except grpc.RpcError as error:
            answer = Answer(rule, request, error.code().name, error.details() or "")
        self._seen(answer)
        return answer
