"""What a test is run with: its kinds, and numbers such as its seed."""

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

from mount.filesystem import FILE_SYSTEMS

_T = TypeVar("_T", bound=str | int)

# Those that grow while they are mounted.
GROWING = [name for name, one in FILE_SYSTEMS.items() if not one.resize]
# Whether all cases are run: see `--every`.
every = False


def numbers(variable: str, **defaults: int) -> dict[str, int]:
    """The defaults, and what the variable has in place of them: `seed=7,examples=400`."""
    pairs = [one.partition("=") for one in filter(None, os.environ.get(variable, "").split(","))]
    found = defaults | {key: int(value) for key, _, value in pairs}
    assert found.keys() == defaults.keys(), f"{variable} knows {', '.join(defaults)}"
    print(f"\n{variable}={','.join(f'{key}={value}' for key, value in found.items())}")
    return found


def kinds(
    cases: Iterable[_T], *, usual: Iterable[_T], fast: Iterable[_T] | None = None
) -> list[ParameterSet]:
    """A test's cases, of which the real tier usually takes some only: see `--every`.

    The fast tier usually takes all; or those of `fast`, where they take long on the fakes, too.
    """
    known, few = list(cases), list(usual)
    some = known if fast is None else [*few, *fast]
    assert {*few, *some} <= {*known}

    def marks(one: _T) -> list[pytest.MarkDecorator]:
        if one in few:
            return []
        return [pytest.mark.variation if one in some else pytest.mark.long]

    return [pytest.param(one, marks=marks(one)) for one in known]
