"""Nodes and pods match as in Kubernetes' scheduler."""

import pytest

from agent.extras.evacuation.scheduling import (
    NodeTerm,
    PodTerm,
    Requirement,
    Taint,
    Toleration,
    satisfies,
    untolerated,
)

LABELS = {"zone": "a", "cores": "16", "empty": "", "big": "9223372036854775808"}


@pytest.mark.parametrize(
    ("key", "operator", "values", "expected"),
    [
        ("zone", "In", ("a", "b"), True),
        ("zone", "In", ("b",), False),
        ("none", "In", ("",), False),
        ("empty", "In", ("",), True),
        ("zone", "NotIn", ("b",), True),
        ("zone", "NotIn", ("a",), False),
        ("none", "NotIn", ("a",), True),
        ("empty", "Exists", (), True),
        ("none", "Exists", (), False),
        ("none", "DoesNotExist", (), True),
        ("empty", "DoesNotExist", (), False),
        ("cores", "Gt", ("15",), True),
        ("cores", "Gt", ("16",), False),
        ("cores", "Gt", ("-1",), True),
        ("cores", "Lt", ("+17",), True),
        ("cores", "Lt", ("16",), False),
        # strconv.ParseInt refuses these.
        ("zone", "Gt", ("1",), False),
        ("none", "Gt", ("1",), False),
        ("big", "Gt", ("1",), False),
        ("empty", "Lt", ("1",), False),
    ],
)
def test_a_requirement_matches_labels_by_its_operator(
    key: str, operator: str, values: tuple[str, ...], expected: bool
) -> None:
    requirement = Requirement(key, operator, values)
    assert requirement.is_valid
    assert requirement.matches(LABELS) is expected
    assert NodeTerm((requirement,)).matches("n", LABELS) is expected


@pytest.mark.parametrize(
    ("operator", "values"),
    [
        *(("In", ()), ("NotIn", ()), ("Exists", ("a",)), ("DoesNotExist", ("a",))),
        *(("Gt", ()), ("Gt", ("1", "2")), ("Gt", ("one",)), ("Lt", ("1_0",)), ("Lt", (" 1",))),
        *(("Gt", ("1" * 5000,)), ("Equals", ("a",)), ("", ("a",))),
    ],
)
def test_a_term_with_an_invalid_requirement_matches_no_node(
    operator: str, values: tuple[str, ...]
) -> None:
    valid, invalid = Requirement("zone", "Exists"), Requirement("cores", operator, values)
    assert not NodeTerm((valid, invalid)).matches("n", LABELS)
    # The other terms of the affinity count all the same.
    assert satisfies((NodeTerm((invalid,)), NodeTerm((valid,))), "n", LABELS)


@pytest.mark.parametrize(
    ("operator", "values", "expected"),
    [
        ("In", ("n",), True),
        ("In", ("m",), False),
        ("NotIn", ("n",), False),
        ("NotIn", ("m",), True),
        # The API allows one value, and these two operators, for fields.
        ("In", ("n", "m"), False),
        ("Exists", (), False),
    ],
)
def test_a_field_is_the_name_of_the_node(
    operator: str, values: tuple[str, ...], expected: bool
) -> None:
    assert NodeTerm((), (Requirement("metadata.name", operator, values),)).matches("n", {}) is (
        expected
    )


def test_labels_and_fields_of_a_term_must_both_match() -> None:
    name = Requirement("metadata.name", "In", ("n",))
    assert NodeTerm((Requirement("zone", "In", ("a",)),), (name,)).matches("n", LABELS)
    assert not NodeTerm((Requirement("zone", "In", ("b",)),), (name,)).matches("n", LABELS)
    assert not NodeTerm((Requirement("zone", "In", ("a",)),), (name,)).matches("m", LABELS)


def test_an_empty_term_and_an_empty_affinity_match_no_node() -> None:
    assert satisfies(None, "n", LABELS)
    assert not satisfies((), "n", LABELS)
    assert not satisfies((NodeTerm(),), "n", LABELS)


TAINT = Taint("dedicated", "NoSchedule", "db")


@pytest.mark.parametrize(
    ("toleration", "expected"),
    [
        (Toleration("dedicated", "Equal", "db", "NoSchedule"), True),
        (Toleration("dedicated", "", "db"), True),
        (Toleration("dedicated", "", "web"), False),
        (Toleration("dedicated", "Exists"), True),
        (Toleration("dedicated", "Exists", effect="NoExecute"), False),
        (Toleration("other", "Exists"), False),
        (Toleration("", "Exists"), True),
        (Toleration("", "Exists", effect="NoSchedule"), True),
        # An empty key with Equal compares the values (ToleratesTaint); the API refuses it.
        (Toleration("", "", "db"), True),
        (Toleration("dedicated", "Gt", "1"), False),
        (Toleration("dedicated", "?", "db"), False),
    ],
)
def test_a_toleration_matches_a_taint(toleration: Toleration, expected: bool) -> None:
    assert toleration.tolerates(TAINT) is expected
    assert (untolerated((TAINT,), (toleration,)) is None) is expected


def test_only_taints_that_forbid_scheduling_must_be_tolerated() -> None:
    prefers = Taint("a", "PreferNoSchedule")
    assert untolerated((prefers,), ()) is None
    assert untolerated((prefers, Taint("b", "NoExecute"), TAINT), ()) == Taint("b", "NoExecute")
    # One toleration for each taint.
    assert untolerated((Taint("b", "NoExecute"), TAINT), (Toleration("b", "Exists"),)) == TAINT
    assert str(TAINT) == "dedicated=db:NoSchedule"


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (PodTerm("h", (Requirement("app", "In", ("db",)),), frozenset({"shop"})), True),
        (PodTerm("h", (Requirement("app", "In", ("web",)),), frozenset({"shop"})), False),
        (PodTerm("h", (Requirement("app", "In", ("db",)),), frozenset({"other"})), False),
        (PodTerm("h", (Requirement("app", "Exists"),), None), True),
        (PodTerm("h", (), frozenset({"shop"})), True),
        (PodTerm("h", None, None), False),
    ],
)
def test_a_term_selects_pods_by_namespace_and_labels(term: PodTerm, expected: bool) -> None:
    assert term.selects("shop", {"app": "db"}) is expected
