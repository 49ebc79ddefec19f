"""The list of extras: optional parts of Carver, each a folder of agent/extras.

No other list of extras exists. Nothing in the core imports an extra; the service, the command and
the controller load the extras that are installed, and work without them. The module `X_service` of
an extra X has `add(service)`, which returns an agent.daemon.extra.Extra; the module `X_controller`
has `add(controller)`, which returns the Extras of the cluster's controller; the module
`X_command_line` has `add(command_line)`.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# Names of the extras, in the order in which they are loaded: an extra may use the extras before it.
NAMES = ("changed_blocks", "transfer", "kubernetes", "orphans", "controller", "evacuation")


def modules(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Import a module from each installed extra; yield the extra's name and the module.

    The module of an extra X is called `X_` and the given `name`. Extras without it are left out.
    """
    for extra in NAMES:
        path = f"agent.extras.{extra}.{extra}_{name}"
        if _exists(path):
            yield extra, import_module(path)


def _exists(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:
        # The folder of this extra, or the folder agent/extras as a whole, is not installed.
        return False
