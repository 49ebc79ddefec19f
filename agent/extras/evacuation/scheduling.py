"""On which nodes the scheduler may place a pod, by the rules of Kubernetes 1.37's scheduler.

The rules are those of the scheduler's plugins that are about labels, taints and other pods:

- NodeAffinity: `nodeSelector` and the required node affinity, both with the operators of the API
  (component-helpers, scheduling/corev1/nodeaffinity/nodeaffinity.go).
- TaintToleration: the effects NoSchedule and NoExecute (api/core/v1/toleration.go).
- InterPodAffinity: the required anti-affinity, also that of pods on the node
  (plugins/interpodaffinity/filtering.go).

CPU, memory, host ports and topology spread are not computed: they depend on pods that come and go.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Effects of a taint that keep the scheduler from placing a pod (DoNotScheduleTaintsFilterFunc).
NO_SCHEDULE, NO_EXECUTE = "NoSchedule", "NoExecute"
# The only field of a Node that a node affinity can name (component-helpers, extractNodeFields).
_NAME_FIELD = "metadata.name"
# Pattern of the integers that strconv.ParseInt accepts in base 10, and their range.
_INTEGER, _INTEGERS = re.compile(r"[+-]?[0-9]+"), range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, order=True)
class Taint:
    """A taint of a Node."""

    key: str
    effect: str
    value: str = ""

    @property
    def repels(self) -> bool:
        """Whether the scheduler places no pod on the node that does not tolerate the taint."""
        return self.effect in (NO_SCHEDULE, NO_EXECUTE)

    def __str__(self) -> str:
        return (
            f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"
        )


@dataclass(frozen=True)
class Toleration:
    """A toleration of a pod.

    An empty effect matches each effect. An empty key matches each key; the API allows it only with
    the operator Exists. An empty operator means Equal. The operators Lt and Gt match nothing: their
    feature (TaintTolerationComparisonOperators) is off by default in Kubernetes 1.37.
    """

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Return whether the toleration matches a taint (ToleratesTaint)."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        if self.operator in ("", "Equal"):
            return self.value == taint.value
        return self.operator == "Exists"


@dataclass(frozen=True)
class Requirement:
    """A requirement of a selector: a key of labels or fields, an operator, and values."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether the number and the form of the values fit the operator (NewRequirement)."""
        if self.operator in ("In", "NotIn"):
            return bool(self.values)
        if self.operator in ("Exists", "DoesNotExist"):
            return not self.values
        if self.operator in ("Gt", "Lt"):
            return len(self.values) == 1 and _integer(self.values[0]) is not None
        return False

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels satisfy a valid requirement (Requirement.Matches)."""
        value = labels.get(self.key)
        if self.operator == "In":
            return value is not None and value in self.values
        if self.operator == "NotIn":
            return value is None or value not in self.values
        if self.operator == "Exists":
            return value is not None
        if self.operator == "DoesNotExist":
            return value is None
        number, limit = _integer(value or ""), _integer(self.values[0])
        if number is None or limit is None:
            return False
        return number > limit if self.operator == "Gt" else number < limit


def _integer(text: str) -> int | None:
    """Return the integer in a text; None if strconv.ParseInt refuses the text."""
    if not _INTEGER.fullmatch(text):
        return None
    # Limit the number of digits before the conversion: Python refuses to convert very long texts.
    number = int(text) if len(text) <= 100 else _INTEGERS.stop
    return number if number in _INTEGERS else None


@dataclass(frozen=True)
class NodeTerm:
    """A term of a node affinity: requirements about the labels and the fields of a Node."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        """Return whether a node satisfies all requirements.

        False for a term without requirements, and for a term with an invalid one.
        """
        if not (self.labels or self.fields):
            return False
        if not all(requirement.is_valid for requirement in self.labels):
            return False
        if not all(
            requirement.operator in ("In", "NotIn") and len(requirement.values) == 1
            for requirement in self.fields
        ):
            return False
        return all(requirement.matches(labels) for requirement in self.labels) and all(
            (name == requirement.values[0]) == (requirement.operator == "In")
            if requirement.key == _NAME_FIELD
            # An unknown field of a Node has the empty value.
            else (requirement.values[0] == "") == (requirement.operator == "In")
            for requirement in self.fields
        )


# Required node affinity of a pod or a PersistentVolume: a node has to satisfy one of the terms.
# None without a node affinity, which each node satisfies; no node satisfies an empty tuple.
NodeAffinity = tuple[NodeTerm, ...] | None


def satisfies(affinity: NodeAffinity, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether a node satisfies a required node affinity."""
    return affinity is None or any(term.matches(name, labels) for term in affinity)


@dataclass(frozen=True)
class PodTerm:
    """A term of a required pod anti-affinity: no pod that it selects in the same topology.

    `requirements` select pods by their labels; empty for each pod, None for no pod. `namespaces`
    are the pods' namespaces; None for each namespace. A term with a namespaceSelector that is not
    empty counts as one for each namespace, since the labels of namespaces are not read.
    """

    topology_key: str
    requirements: tuple[Requirement, ...] | None
    namespaces: frozenset[str] | None

    def selects(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return whether the term selects a pod, by the pod's namespace and labels."""
        if self.requirements is None:
            return False
        if self.namespaces is not None and namespace not in self.namespaces:
            return False
        return all(
            requirement.is_valid and requirement.matches(labels)
            for requirement in self.requirements
        )


def untolerated(taints: tuple[Taint, ...], tolerations: tuple[Toleration, ...]) -> Taint | None:
    """Return the first taint that keeps a pod with these tolerations from a node; None without."""
    for taint in taints:
        if taint.repels and not any(toleration.tolerates(taint) for toleration in tolerations):
            return taint
    return None
