"""Which tags follow a volume: each is decided, and all that carry tags go by the same table."""

from agent.core import tag
from agent.core.tag import FOLLOWS, Follows
from agent.extras.transfer import stream_descriptions
from agent.operations import plan, snapshot
from agent.requests import parameters
from lvm import tuning


def keys() -> set[str]:
    """The keys of all tags: those of tag.py, and those of mutable parameters."""
    values = {tag.FULLY, tag.BETWEEN, tag.READY, tag.COPYING, tag.WIPING, tag.RECEIVING, tag.MOVED}
    of_tag = {one for name, one in vars(tag).items() if name.isupper() and isinstance(one, str)}
    of_tuning = {one.tag for one in tuning.SETTINGS if one.tag} | {tuning.OWN_MAXIMUM}
    return (of_tag - values) | of_tuning


def test_of_each_tag_it_is_decided_whether_it_follows_a_volume() -> None:
    assert FOLLOWS.keys() == keys()


def test_each_parameter_that_a_volume_keeps_follows_a_move() -> None:
    """But for those of the class there: its layout, its cache, and how it is zeroed."""
    kept = {row.tag for row in parameters.STORAGE_CLASS if row.tag} - {tag.LAYOUT, tag.CACHE}
    mutable = {row.key for row in parameters.MUTABLE}
    assert kept <= set(stream_descriptions.SENT)
    assert mutable == set(stream_descriptions._MUTABLE)
    assert {key for key, where in FOLLOWS.items() if Follows.MOVE in where} <= mutable | set(
        stream_descriptions.SENT
    )


def test_what_a_copy_gets_its_snapshot_has() -> None:
    assert set(plan._COPIED) <= set(snapshot.INHERITED)
    for key, where in FOLLOWS.items():
        assert Follows.SNAPSHOT in where or Follows.COPY not in where, key
