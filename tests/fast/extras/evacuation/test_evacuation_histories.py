"""Whatever happens while a node is evacuated, no line is lost, and all claims are bound at last."""

import chosen
import evacuation_histories as histories
import pytest


def play(seed: str) -> None:
    """A history whose end is drawn, too."""
    with histories.history(seed) as history:
        history.run(30.0)
        history.both = history.chance.choice((0, 0, 2))
        history.storm(history.chance.randint(3, 15))
        history.calm()
        end = history.chance.choice(["{}", "{}", '"undo"', None])
        history.kube.request("a", end)
        history.kube.request("b", '"undo"' if history.both else None)
        history.kube.uncordon("b")
        history.kube.uncordon("c")
        if end is None:
            history.kube.uncordon("a")
        left = "a" if end == "{}" else ""
        history.settle(lambda: history.is_settled(left=left))
        if end is not None:
            history.settle(lambda: history.left_over(quarantined=True))
            # The time of grace is over.
            history.ahead = 4 * 86400.0
            history.settle(lambda: history.left_over(quarantined=False))
        history.settle(lambda: history.is_settled(left=left))


@pytest.mark.parametrize("number", range(8))
def test_random_histories(number: int) -> None:
    asked = chosen.numbers("CARVER_EVACUATIONS", seed=1, histories=5)
    for index in range(asked["histories"]):
        play(f"{asked['seed']} {number} {index}")
