"""Tags that are too long for LVM are refused where they are read, not by lvm2."""

import pytest

from agent.core import errors, tag
from lvm import tags


@pytest.mark.parametrize("character", ["a", "&", "\x00", "ä", "\U0001f4be"])
def test_a_text_is_refused_exactly_where_its_tag_would_be_too_long(character: str) -> None:
    # 300 characters of key and text are not encoded to see whether they fit, if they are ASCII.
    for length in (1, 80, 84, 85, 290, 296, 297, 338, 339, 1012, 1013):
        text = character * length
        if len(tags.format_one("size", text)) <= tags.MAXIMUM_LENGTH:
            tag.require_fits("parameters", "size", text)
        else:
            with pytest.raises(errors.BadField, match="too long"):
                tag.require_fits("parameters", "size", text)
