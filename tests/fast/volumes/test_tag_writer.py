"""A volume's tags, as operations write them."""

import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.core import errors, tag
from agent.csi.client import block
from agent.daemon.server import Service
from agent.volumes import backing
from agent.volumes.volume_states import Call


@pytest.fixture
def volume(client: Client) -> str:
    return client.create("a", 16 << 20, block()).volume_id


def test_a_tag_is_written_replaced_and_removed(
    service: Service, fake: FakeHost, volume: str
) -> None:
    tag_writer, mender = service.context.tag_writer, service.context.mender
    logical = backing.of_id(volume)
    for new in ({tag.ROTATING: "one"}, {tag.ROTATING: "an other, with spaces"}, {}):
        tag_writer.replace(logical, (tag.ROTATING,), new)
        assert mender.mended_volume(volume, Call.USE).own_tags.get(tag.ROTATING) == new.get(
            tag.ROTATING
        )
        fake.commands.clear()
        tag_writer.replace(logical, (tag.ROTATING,), new)
        assert {words[1] for words in fake.commands} <= {"fullreport"}


def test_a_value_that_is_too_long_is_refused_before_any_command(
    service: Service, fake: FakeHost, volume: str
) -> None:
    fake.commands.clear()
    with pytest.raises(errors.BadField, match="rotating: is too long"):
        service.context.tag_writer.replace(backing.of_id(volume), (), {tag.ROTATING: "x" * 1024})
    assert fake.commands == []
    assert tag.ROTATING not in service.context.mender.mended_volume(volume, Call.USE).own_tags
