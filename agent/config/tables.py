"""Tables of the configuration file, checked key by key; a refusal names the source and the key."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agent import errors


def checked(source: str, key: str, parse: Callable[[Any], Any], raw: object) -> Any:
    """A value as `parse` reads it; raises BadConfig where that refuses it with a ValueError."""
    try:
        return parse(raw if not isinstance(raw, tuple) else list(raw))
    except ValueError as error:
        raise errors.BadConfig(source, key, f"{raw!r} is not allowed: {error}") from None


def read(
    source: str,
    name: str,
    tables: object,
    keys: Mapping[str, Callable[[Any], Any]],
    required: Sequence[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of a list such as [[classes]], checked key by key, each with where it stands."""
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise errors.BadConfig(source, name, f"is a list of tables: [[{name}]]")
    for index, table in enumerate(tables):
        where = f"{name}[{index}]"
        for key in table:
            if key not in keys:
                allowed = ", ".join(keys)
                raise errors.BadConfig(
                    source, f"{where}.{key}", f"is not a key; allowed: {allowed}"
                )
        for key in required:
            if key not in table:
                raise errors.BadConfig(source, f"{where}.{key}", "is required")
        yield (
            where,
            {key: checked(source, f"{where}.{key}", keys[key], raw) for key, raw in table.items()},
        )
