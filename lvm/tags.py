"""Carver's facts about a volume, as LVM tags: `carver.<key>=<value>`."""

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

PREFIX = "carver."

# lvm(8): a tag is made of these and has at most 1024 characters.
MAXIMUM_LENGTH = 1024
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+.-/=!:#")
# Those of each volume are asked for in each call, and change seldom.
_KEPT = 10_000
_ESCAPE = re.compile(r"&([0-9a-f]{2})")


def escape(text: str) -> str:
    """Text as a tag may hold it: any other byte of its UTF-8 becomes `&` and two hex digits."""
    return "".join(chr(byte) if byte in _PLAIN else f"&{byte:02x}" for byte in text.encode())


def unescape(text: str) -> str:
    """The inverse of `escape`."""
    if "&" not in text and text.isascii():
        return text
    raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    # What others wrote there is no text perhaps; it is nobody's fact then, and breaks no report.
    return raw.encode("latin-1", "replace").decode(errors="replace")


def fits(key: str, value: str) -> bool:
    """Whether a fact fits in one tag."""
    return len(format_one(key, value)) <= MAXIMUM_LENGTH


def format_one(key: str, value: str) -> str:
    """One fact as a tag."""
    return f"{PREFIX}{escape(key)}={escape(value)}"


def encode(facts: Mapping[str, str]) -> list[str]:
    """Facts as tags, in the facts' order."""
    return [format_one(key, value) for key, value in facts.items()]


def words(option: str, facts: Mapping[str, str]) -> list[str]:
    """Facts as lvm2 is told of them: each tag after `--addtag` or `--deltag`."""
    return [word for tag in encode(facts) for word in (option, tag)]


@lru_cache(_KEPT)
def decode(tags: frozenset[str]) -> Mapping[str, str]:
    """The facts among a volume's tags; tags of others are left out."""
    facts = {}
    for tag in tags:
        key, separator, value = tag.removeprefix(PREFIX).partition("=")
        if tag.startswith(PREFIX) and separator:
            facts[unescape(key)] = unescape(value)
    return MappingProxyType(facts)
