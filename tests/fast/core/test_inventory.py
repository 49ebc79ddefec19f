"""A volume's tags, as operations write them."""

import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.core import errors, tag
from agent.core.volume_states import Call
from agent.csi.client import block
from agent.daemon.server import Service


@pytest.fixture
def volume(client: Client) -> str:
    return client.create("a", 16 << 20, block()).volume_id


def test_a_tag_is_written_replaced_and_removed(
    service: Service, fake: FakeHost, volume: str
) -> None:
    known = service.inventory
    for new in ({tag.ROTATING: "one"}, {tag.ROTATING: "an other, with spaces"}, {}):
        known.replace_tags("data", "vol-a", (tag.ROTATING,), new)
        assert known.require(volume, Call.USE).own_tags.get(tag.ROTATING) == new.get(tag.ROTATING)
        fake.commands.clear()
        known.replace_tags("data", "vol-a", (tag.ROTATING,), new)
        assert {words[1] for words in fake.commands} <= {"fullreport"}


def test_a_value_that_is_too_long_is_refused_before_any_command(
    service: Service, fake: FakeHost, volume: str
) -> None:
    fake.commands.clear()
    with pytest.raises(errors.BadField, match="rotating: is too long"):
        service.inventory.replace_tags("data", "vol-a", (), {tag.ROTATING: "x" * 1024})
    assert fake.commands == []
    assert tag.ROTATING not in service.inventory.require(volume, Call.USE).own_tags
