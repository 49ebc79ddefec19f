"""What the tests of streams have in common: nodes that volumes come from and go to."""

from collections.abc import Iterator
from pathlib import Path

import configured
import nodes
import pytest
from fakes.host import FakeHost
from nodes import Node


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


@pytest.fixture
def here(fake: FakeHost, tmp_path: Path) -> Iterator[Node]:
    with nodes.made(fake, configured.carver(tmp_path), tmp_path, "here") as node:
        yield node


@pytest.fixture
def there(fake: FakeHost, tmp_path: Path) -> Iterator[Node]:
    with nodes.made(fake, configured.carver(tmp_path), tmp_path, "there") as node:
        yield node
