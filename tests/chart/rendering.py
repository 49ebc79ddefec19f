"""What the tests of the chart share: values to render it with, and the words for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

FILES = sorted((Path(__file__).parent / "values").glob("*.yaml"))

Values = dict[str, Any]
# What is given where a test is about something else: the chart asks for a choice.
DEMO: Values = {"demo": True}
# Values, release and API groups of the cluster in, the path of a file with the objects out.
Template = Callable[..., Path]

both_modes = pytest.mark.parametrize("central", [True, False], ids=["central", "distributed"])
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


class Refused(Exception):
    """What helm says to values that it does not take."""


def read(file: Path) -> Values:
    return dict(yaml.safe_load(file.read_text()))


def in_mode(values: Values, central: bool) -> Values:
    """The same values, with a controller for the cluster, or without and what only it does."""
    off = {"enabled": False}
    own = {} if central else {"attach": False, "evacuation": off, "releaseLostClaims": off}
    return values | own | {"controller": {**values.get("controller", {}), "enabled": central}}
