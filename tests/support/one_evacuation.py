"""The evacuation of node a of a small cluster in memory, as a test lets it go on step by step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import evacuation_histories as histories
from evacuation_histories import Controller, History

ONE: Mapping[str, Mapping[str, str]] = {"db-0": {"data-db-0": "linear"}}


@contextmanager
def cluster(
    replicas: Mapping[str, Mapping[str, str]] = ONE, *, policy: str = "Delete", seed: str = "one"
) -> Iterator[History]:
    """A cluster with a StatefulSet on node a, whose pods run."""
    with histories.history(seed, make=False) as history:
        for name, claims in replicas.items():
            history.kube.replica(name, claims, "a", policy)
        history.settle(history.is_settled)
        yield history


def evacuate(history: History, text: str = "{}") -> Controller:
    history.kube.request("a", text)
    return history.start()


def run_until(history: History, stage: str) -> None:
    """Let an evacuation go on until a call or a write has been carried out."""
    seen: list[str] = []
    history.moves.called = lambda _node, name: seen.append(name)
    begun = len(history.kube.writes)

    def is_there() -> bool:
        if " " not in stage and stage != "PATCH":
            return stage in seen
        method, _, kind = stage.partition(" ")
        parts = {"volume": "/persistentvolumes", "claim": "persistentvolumeclaims", "": "/"}
        return any(
            write.startswith(method) and parts[kind] in write and "/events" not in write
            for write in history.kube.writes[begun:]
        )

    history.run(3600.0, is_there)
    history.moves.called = lambda _node, _name: None
    assert is_there(), stage


def said(history: History, reason: str) -> list[str]:
    """The texts of the Events of a reason."""
    return [text for known, _, text in history.kube.said if known == reason]


def calls(history: History, name: str) -> Callable[[], int]:
    """Count the calls of a name from now on."""
    count = [0]

    def called(_node: str, known: str) -> None:
        count[0] += known == name

    history.moves.called = called
    return lambda: count[0]
