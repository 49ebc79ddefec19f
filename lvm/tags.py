"""Carver's own tags: LVM tags of the form `carver.<key>=<value>`."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

PREFIX = "carver."

# lvm(8): a tag is made of these and has at most 1024 characters.
MAXIMUM_LENGTH = 1024
_OTHER = re.compile(r"[^a-zA-Z0-9_+.\-/=!:#]")
_ESCAPE = re.compile(r"&([0-9a-f]{2})")
_NUMBER = re.compile(r"[0-9]{1,19}")
# The largest that gRPC's int64 holds.
_MOST = (1 << 63) - 1


def escape(text: str) -> str:
    """Text as a tag may hold it: any other byte of its UTF-8 becomes `&` and two hex digits."""
    return _OTHER.sub(lambda found: "".join(f"&{byte:02x}" for byte in found[0].encode()), text)


def unescape(text: str) -> str:
    """The inverse of `escape`."""
    if "&" not in text and text.isascii():
        return text
    raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    # Bytes that others wrote may be no UTF-8: then it is no tag of Carver's, and breaks no report.
    return raw.encode("latin-1", "replace").decode(errors="replace")


def fits(key: str, value: str) -> bool:
    """Whether a key and its value fit in one tag."""
    return len(format_one(key, value)) <= MAXIMUM_LENGTH


def format_one(key: str, value: str) -> str:
    """Encode one key and its value as a tag."""
    return f"{PREFIX}{escape(key)}={escape(value)}"


# Own tags by their keys, or as pairs, where one key may have several values.
Tags = Mapping[str, str] | Collection[tuple[str, str]]


def encode(own_tags: Tags) -> list[str]:
    """Encode own tags, in their order."""
    pairs = own_tags.items() if isinstance(own_tags, Mapping) else own_tags
    return [format_one(key, value) for key, value in pairs]


def words(option: str, own_tags: Tags) -> list[str]:
    """Encode own tags as arguments of lvm2: each after `--addtag` or `--deltag`."""
    return [word for tag in encode(own_tags) for word in (option, tag)]


def decode(tags: Iterable[str]) -> Mapping[str, str]:
    """Carver's own tags by their keys; tags of others are left out.

    Of several values of one key the first in order counts, the same in each process; `doubled`
    tells which keys have several.
    """
    own_tags: dict[str, str] = {}
    for key, value in _parts(tags):
        own_tags[key] = min(value, own_tags.get(key, value))
    return MappingProxyType(own_tags)


def values(tags: Iterable[str], key: str) -> list[str]:
    """All values of one key; one at most, unless others wrote tags."""
    return sorted(value for found, value in _parts(tags) if found == key)


def doubled(tags: Iterable[str]) -> frozenset[str]:
    """The keys of Carver's own tags that have several values, as only others write them."""
    found = Counter(key for key, _ in _parts(tags))
    return frozenset(key for key, times in found.items() if times > 1)


def _parts(tags: Iterable[str]) -> Iterator[tuple[str, str]]:
    for tag in tags:
        key, separator, value = tag.removeprefix(PREFIX).partition("=")
        if tag.startswith(PREFIX) and separator:
            yield unescape(key), unescape(value)


def number(text: str) -> int | None:
    """The number that a tag holds; None for any other text, and for one of more than 63 bits.

    Each number in a tag is read here: what others wrote must not break a list of all volumes.
    """
    if not _NUMBER.fullmatch(text):
        return None
    found = int(text)
    return found if found <= _MOST else None
