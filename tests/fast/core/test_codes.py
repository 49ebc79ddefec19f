"""Every error has its code, and none hides behind another."""

import types

import grpc
import pytest

import agent.core.errors
import lvm.errors
import mount.errors
from agent.core import codes


def errors_of(module: types.ModuleType) -> list[type[Exception]]:
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, Exception)
        and one.__module__ == module.__name__
    ]


@pytest.mark.parametrize("module", [agent.core.errors, lvm.errors, mount.errors])
def test_every_error_is_in_the_table(module: types.ModuleType) -> None:
    listed = {kind for kind, _ in codes.TABLE}
    missing = [one.__name__ for one in errors_of(module) if one not in listed]
    assert missing == [], "add to TABLE of agent/core/codes.py"


def test_no_error_is_shadowed_by_one_before_it() -> None:
    kinds = [kind for kind, _ in codes.TABLE]
    for index, kind in enumerate(kinds):
        before = [one.__name__ for one in kinds[:index] if issubclass(kind, one)]
        assert before == [], kind


def test_an_rpc_that_is_not_implemented_is_no_internal_error() -> None:
    assert codes.code_of(NotImplementedError()) is grpc.StatusCode.UNIMPLEMENTED
    assert codes.code_of(ZeroDivisionError()) is grpc.StatusCode.INTERNAL
