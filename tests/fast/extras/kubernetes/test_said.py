"""Events about what lasts are renewed before the API server deletes them, and not written often."""

import itertools
import random

import chosen

from agent.extras.kubernetes.events import Said

# How long the API server keeps an Event, by default.
TTL_SECONDS = 3600.0


def test_what_lasts_is_always_there_and_what_was_done_is_said_once() -> None:
    asked = chosen.numbers("CARVER_SAID", seed=1, histories=200)
    for number in range(asked["histories"]):
        chance = random.Random(f"{asked['seed']} {number}")
        now = [0.0]
        said = Said(lambda now=now: now[0])  # type: ignore[misc]
        interval = chance.choice((1.0, 10.0, 60.0, 300.0))
        pause = chance.choice((0.0, 0.0, 600.0))
        lasts, written = chance.random() < 0.5, list[tuple[float, str]]()
        text = "0"
        for _ in range(300):
            now[0] += interval
            text = chance.choice((text,) * 9 + ("1", "2"))
            if said.is_due("claim", text, lasts=lasts, pause_seconds=pause):
                written.append((now[0], text))
            if lasts:
                # The Event is there.
                assert now[0] - written[-1][0] < TTL_SECONDS
            # The Event says what is so, or did so a short while ago.
            assert written[-1][1] == text or now[0] - written[-1][0] < pause
        for (first, before), (second, after) in itertools.pairwise(written):
            assert second - first >= (pause if before != after else TTL_SECONDS / 2)
            assert lasts or before != after


def test_what_could_not_be_written_is_written_next_time() -> None:
    said = Said(lambda: 0.0)
    assert said.is_due("claim", "text")
    assert not said.is_due("claim", "text")
    said.forget("claim")
    assert said.is_due("claim", "text")
    assert said.is_due("another", "text")
