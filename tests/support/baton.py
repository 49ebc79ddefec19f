"""Threads that run one at a time, in an order that a seed decides, by a clock that a test moves.

Each thread of a process of the model is an actor. It runs until a point, and the next actor is
drawn. A process that is killed goes no further than its next point.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Killed(BaseException):
    """The process is dead. No Exception, so that no handler takes it for an error."""


@dataclass(eq=False)
class Process:
    """What is killed as a whole."""

    name: str
    is_dead: bool = False


@dataclass(eq=False)
class Actor:
    """A thread of a process; `wake` is when it goes on, unless its event is set before."""

    process: Process
    wake: float = 0.0
    event: threading.Event | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_over: bool = False
    error: BaseException | None = None


class Baton:
    """Draws which actor goes on. `now` are the seconds of a clock that is never set."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 1000.0
        self.points = 0
        # What happens between two steps of actors.
        self.between: Callable[[], None] = lambda: None
        self._actors: list[Actor] = []
        self._back = threading.Semaphore(0)
        self._own = threading.local()

    def begin(self, process: Process, work: Callable[[], Any]) -> Actor:
        """A further thread of a process."""
        actor = Actor(process, self.now)

        def run() -> None:
            self._own.actor = actor
            actor.go.acquire()
            try:
                if not process.is_dead:
                    work()
            except Killed:
                pass
            except BaseException as error:
                actor.error = error
            finally:
                actor.is_over = True
                self._back.release()

        threading.Thread(target=run, daemon=True).start()
        self._actors.append(actor)
        return actor

    def point(self) -> None:
        """Let others go on, if this is a thread of an actor's."""
        self.wait(None, 0.0)

    def wait(self, event: threading.Event | None, seconds: float) -> bool:
        """Let time go by for an actor; whether the event is set."""
        actor: Actor | None = getattr(self._own, "actor", None)
        if actor is None:
            return event is not None and event.is_set()
        if actor.process.is_dead:
            raise Killed
        actor.wake, actor.event = self.now + seconds, event
        self._back.release()
        actor.go.acquire()
        if actor.process.is_dead:
            raise Killed
        return event is not None and event.is_set()

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    def kill(self, process: Process) -> None:
        """End all threads of a process."""
        process.is_dead = True
        for actor in [one for one in self._actors if one.process is process]:
            while not actor.is_over:
                self._give(actor)
        self._clean()

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let actors go on until a time, or until a condition holds."""
        while self.now < until and not is_over():
            self.between()
            ready = [
                one
                for one in self._actors
                if one.wake <= self.now or (one.event is not None and one.event.is_set())
            ]
            if not ready:
                wake = min([until, *(one.wake for one in self._actors)])
                # Not all at once: what happens between goes on, too.
                self.now = min(max(wake, self.now), self.now + 5.0)
                continue
            self._give(self.chance.choice(ready))
            self._clean()

    def _give(self, actor: Actor) -> None:
        self.points += 1
        self.now += self.chance.choice((0.0, 0.001, 0.01, 0.1))
        actor.go.release()
        self._back.acquire()

    def _clean(self) -> None:
        for actor in self._actors:
            if actor.error is not None:
                raise actor.error
        self._actors = [one for one in self._actors if not one.is_over]
