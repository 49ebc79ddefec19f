"""Every error class of Carver."""

import agent.core.errors
import lvm.errors
import mount.errors

EVERY: tuple[type[Exception], ...] = tuple(
    one
    for module in (agent.core.errors, lvm.errors, mount.errors)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Exception) and one.__module__ == module.__name__
)
