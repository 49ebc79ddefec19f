"""Carver's own tags: LVM tags of the form `carver.<key>=<value>`."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

PREFIX = "carver."

# Length limit of an LVM tag, in characters (lvm(8)).
MAXIMUM_LENGTH = 1024
# Length of a key and a value together, in ASCII characters, with which a tag is never too long:
# each character becomes at most three in the tag.
_ALWAYS_FITS = 300
# Characters that are escaped: those that an LVM tag may not have (lvm(8)), and `&`.
_OTHER = re.compile(r"[^a-zA-Z0-9_+.\-/=!:#]")
_ESCAPE = re.compile(r"&([0-9a-f]{2})")
_NUMBER = re.compile(r"[0-9]{1,19}")
# Largest number in a tag, which is the largest int64 of gRPC.
_MOST = (1 << 63) - 1


def escape(text: str) -> str:
    """Escape a text for a tag: each byte that a tag cannot have becomes `&` and two hex digits."""
    return _OTHER.sub(lambda match: "".join(f"&{byte:02x}" for byte in match[0].encode()), text)


def unescape(text: str) -> str:
    """Decode a text that `escape` made; invalid UTF-8 is replaced, and raises no error."""
    if "&" not in text and text.isascii():
        return text
    raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    # Another program may have written bytes that are not UTF-8. Such bytes must not break a report.
    return raw.encode("latin-1", "replace").decode(errors="replace")


def fits(key: str, value: str) -> bool:
    """Whether a key and its value fit in one tag."""
    if len(key) + len(value) <= _ALWAYS_FITS and key.isascii() and value.isascii():
        return True
    return len(format_one(key, value)) <= MAXIMUM_LENGTH


def format_one(key: str, value: str) -> str:
    """Encode one key and its value as a tag."""
    return f"{PREFIX}{escape(key)}={escape(value)}"


# Carver's own tags, by their keys, or as pairs where a key may have several values.
Tags = Mapping[str, str] | Collection[tuple[str, str]]


def encode(own_tags: Tags) -> list[str]:
    """Encode Carver's own tags, in their order."""
    pairs = own_tags.items() if isinstance(own_tags, Mapping) else own_tags
    return [format_one(key, value) for key, value in pairs]


def words(option: str, own_tags: Tags) -> list[str]:
    """Encode Carver's own tags as arguments of lvm2, each after the option (--addtag, --deltag)."""
    return [word for tag in encode(own_tags) for word in (option, tag)]


def change(old_tags: Tags, new_tags: Tags) -> list[str]:
    """Encode the replacement of tags by others as arguments of lvm2; empty for no change."""
    return [*words("--deltag", old_tags), *words("--addtag", new_tags)]


def decode(tags: Iterable[str]) -> Mapping[str, str]:
    """Find Carver's tags among all tags of a volume group or volume; return the values by key.

    If a key has several values, the alphabetically first one counts, so that each process decides
    alike. `ambiguous_keys` has the keys with several values.
    """
    own_tags: dict[str, str] = {}
    for key, value in _parts(tags):
        own_tags[key] = min(value, own_tags.get(key, value))
    return MappingProxyType(own_tags)


def values(tags: Iterable[str], key: str) -> list[str]:
    """All values of a key of Carver's tags, sorted. Carver itself gives each key one value."""
    return sorted(value for tag_key, value in _parts(tags) if tag_key == key)


def ambiguous_keys(tags: Iterable[str]) -> frozenset[str]:
    """The keys of Carver's own tags that have several values; only another program does that."""
    counts = Counter(key for key, _ in _parts(tags))
    return frozenset(key for key, times in counts.items() if times > 1)


def _parts(tags: Iterable[str]) -> Iterator[tuple[str, str]]:
    for tag in tags:
        key, separator, value = tag.removeprefix(PREFIX).partition("=")
        if tag.startswith(PREFIX) and separator:
            yield unescape(key), unescape(value)


def number(text: str) -> int | None:
    """Parse the number in a tag; None for any other text, and for a number of more than 63 bits.

    All numbers in tags are parsed by this function: a tag that another program wrote must not break
    a list of all volumes.
    """
    if not _NUMBER.fullmatch(text):
        return None
    value = int(text)
    return value if value <= _MOST else None
