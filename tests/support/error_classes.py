"""Every error class of Carver, and its gRPC code."""

import grpc

import agent.core.errors
import lvm.lvm_errors
import mount.mount_errors
from agent.core import codes

EVERY: tuple[type[Exception], ...] = tuple(
    one
    for module in (agent.core.errors, lvm.lvm_errors, mount.mount_errors)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Exception) and one.__module__ == module.__name__
)


def code_of(kind: type[Exception]) -> grpc.StatusCode:
    """The code of an error of this class, whatever it says."""
    return codes.code_of(kind.__new__(kind))
