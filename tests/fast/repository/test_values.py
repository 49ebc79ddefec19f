"""The chart's values: each is explained, and what is none is refused.

Whether each is heeded is seen in tests/chart, which needs helm.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from chart import documented
from chart.documented import CHART, ITEM, Place

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def values() -> Any:
    return yaml.safe_load(documented.VALUES.read_text())


def check(given: Any) -> None:
    jsonschema.validate(given, SCHEMA)


def sections(given: Any, place: Place = ()) -> Iterator[Place]:
    """The maps whose keys are the chart's own, and not Kubernetes' or the user's."""
    known = {above[:length] for above in documented.places() for length in range(len(above))}
    if place in known:
        if isinstance(given, dict):
            yield place
            for key, value in given.items():
                yield from sections(value, (*place, key))
        elif isinstance(given, list):
            for one in given:
                yield from sections(one, (*place, ITEM))


def resolved(schema: Any) -> Any:
    if "$ref" not in schema:
        return schema
    return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]


def keys(schema: Any, place: Place = ()) -> Iterator[Place]:
    """The values that the schema knows by name."""
    schema = resolved(schema)
    if "items" in schema and "properties" in resolved(schema["items"]):
        yield from keys(schema["items"], (*place, ITEM))
    elif "properties" in schema:
        for key, one in schema["properties"].items():
            yield from keys(one, (*place, key))
    else:
        yield place


def test_every_value_has_a_comment() -> None:
    assert list(documented.places(commented=False)) == []
    assert len(list(documented.places(commented=True))) > 100


def test_the_values_are_such_as_their_schema_allows() -> None:
    check(values())


def test_the_schema_knows_the_values_and_no_others() -> None:
    # These are one value each: a pool has what the top has, the others have what Kubernetes names.
    one = {"pools", "startupProbe", "livenessProbe", "readinessProbe", "imagePullSecrets"}
    known = set()
    for place in keys(SCHEMA):
        above = tuple(itertools.takewhile(lambda key: key not in one, place))
        known.add(place[: len(above) + 1])
    assert known - {("global",)} == set(documented.places())


@pytest.mark.parametrize("place", list(sections(values())), ids=".".join)
def test_an_unknown_key_is_refused(place: Place) -> None:
    given = values()
    found = given
    for key in place:
        found = found[0] if key == ITEM else found[key]
    found["typo"] = True
    with pytest.raises(jsonschema.ValidationError, match="typo"):
        check(given)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("lvm2",), "docker"),
        (("kubeletDir",), "var/lib/kubelet"),
        (("image", "digest"), "latest"),
        (("driverName",), "Carver"),
        (("csiDriver", "volumeLifecycleModes"), ["Ephemral"]),
        (("metrics", "port"), "9898"),
        (("sidecars", "snapshotter", "enabled"), "yes"),
        (("sidecars", "provisioner", "capacityPollInterval"), "5"),
        (("pools",), [{"name": "a", "node": {"nodeselector": {}}}]),
        (("storageClasses",), [{"name": "a", "volumeBindingMode": "immediate"}]),
    ],
    ids=lambda one: ".".join(one) if isinstance(one, tuple) else "",
)
def test_a_value_of_another_kind_is_refused(place: Place, wrong: object) -> None:
    given = values()
    found = given
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        check(given)
