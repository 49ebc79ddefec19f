"""Numbers that a test is run with, such as its seed, as the environment may choose them."""

import os


def numbers(variable: str, **defaults: int) -> dict[str, int]:
    """The defaults, and what the variable has in place of them: `seed=7,examples=400`."""
    pairs = [one.partition("=") for one in filter(None, os.environ.get(variable, "").split(","))]
    found = defaults | {key: int(value) for key, _, value in pairs}
    assert found.keys() == defaults.keys(), f"{variable} knows {', '.join(defaults)}"
    print(f"\n{variable}={','.join(f'{key}={value}' for key, value in found.items())}")
    return found
