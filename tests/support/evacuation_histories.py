"""Histories of a cluster of three nodes that are evacuated, and what must be so in the end."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from baton import Baton, Process
from evacuation_kube import Kube, Violation
from moving_model import ModelMoves, Service, inventory

from agent.core import tag
from agent.extras.evacuation.cluster_view import ClusterView
from agent.extras.evacuation.evacuation_context import EXPECTED, Context
from agent.extras.evacuation.evacuator import Evacuator
from agent.extras.evacuation.node_inventory import Inventory
from agent.extras.evacuation.progress import Progress
from agent.extras.kubernetes import objects, rebinding
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists
from agent.extras.transfer import move
from agent.settings.settings import DRIVER_NAME

NAMES = ("a", "b", "c")
GRACE_SECONDS = 86400.0
_KEY = f"evacuate.{DRIVER_NAME}"
# When the API server's clock stood at 0.
EPOCH = 1767225600.0


class View(ClusterView):
    """Reads the API server of a history; its nodes are those of the model."""

    def __init__(self, history: "History", server: Server) -> None:
        super().__init__(DRIVER_NAME, cast(Any, None), Lists(server), cast(Any, None))
        self._history = history

    def _ask_nodes(self, node: str, candidates: Sequence[str]) -> Inventory:
        self._history.baton.point()
        return cast(Inventory, inventory(self._history.services, node, candidates))


class Controller:
    """A process of the controller."""

    def __init__(self, history: "History", name: str) -> None:
        self.process, self._history = Process(name), history
        baton = history.baton
        server = Server("history", "127.0.0.1", 1)
        self.progress = Progress(lambda: baton.now)
        self.context = Context(
            DRIVER_NAME,
            server,
            history.moves,
            self.progress,
            history.wall_clock,
            lambda: baton.now,
            lambda _name, work: baton.begin(self.process, work),
            baton.wait,
        )
        view = View(history, server)
        self.evacuator = Evacuator(self.context, view.view, GRACE_SECONDS)
        # Whether it evacuates nodes; no more than one should, and several may for a while.
        self.is_leader = True
        baton.begin(self.process, self._run)

    def _run(self) -> None:
        while True:
            try:
                if self.is_leader:
                    self.evacuator.look()
                else:
                    self.evacuator.stand_by()
            except EXPECTED:
                self._history.problems += 1
            self._history.baton.sleep(10.0)


class Connection:
    """In the place of a connection to the API server."""

    kube: Kube

    def __init__(self, *_: object) -> None:
        """Be open."""

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        """Be closed."""

    def request(
        self,
        method: str,
        path: str,
        deadline: float,
        body: bytes | None = None,
        content: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        status, document = self.kube.answer(method, path, body)
        return status, json.dumps(document).encode()


class History:
    """Three nodes, a StatefulSet whose volumes are on the first, and controllers."""

    def __init__(self, seed: str, *, make: bool = True) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.baton = Baton(self.chance)
        self.services = {
            name: Service(name, number, lambda: self.baton.now) for number, name in enumerate(NAMES)
        }
        self.kube = Kube(self.services, self.baton)
        self.moves = ModelMoves(self.services, self.baton)
        self.moves.stream_seconds = lambda: self.chance.choice((0.0, 0.5, 5.0, 20.0))
        self.baton.between = self._between
        self.ahead = 0.0
        self.problems = 0
        self.has_stepped = self.has_lost_group = False
        self.controllers: list[Controller] = []
        self._count = 0
        if make:
            self._make()

    def _make(self) -> None:
        chance = self.chance
        self.kube.is_parallel = chance.random() < 0.5
        for number in range(3):
            claims = {f"data-db-{number}": chance.choice(("linear", "thin", "sealed"))}
            if chance.random() < 0.2:
                claims[f"log-db-{number}"] = chance.choice(("linear", "thin", "sealed"))
            node = "a" if number == 0 or chance.random() < 0.7 else "b"
            policy = chance.choice(("Delete", "Delete", "Retain"))
            self.kube.replica(f"db-{number}", claims, node, policy)

    def wall_clock(self) -> float:
        return EPOCH + self.baton.now + self.ahead

    def start(self) -> Controller:
        """Another controller begins."""
        self._count += 1
        made = Controller(self, f"controller-{self._count}")
        self.controllers.append(made)
        return made

    def kill(self, controller: Controller) -> None:
        self.controllers.remove(controller)
        self.baton.kill(controller.process)

    def end(self) -> None:
        """Have no thread be left."""
        for controller in list(self.controllers):
            self.kill(controller)

    def _between(self) -> None:
        for _ in range(self.chance.choice((0, 1, 3))):
            self.kube.tick()
        self.kube.check()

    def run(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        self.baton.run(self.baton.now + seconds, is_over)

    # What happens

    def storm(self, steps: int) -> None:
        """So many things happen, at random moments."""
        chance = self.chance
        self.moves.fails = lambda: chance.random() < self._odds
        self.moves.cuts = lambda: chance.random() < self._cut_odds
        self.kube.fails = lambda: (
            chance.choice(("lost before", "lost after", "lost after", "busy"))
            if chance.random() < self._odds
            else ""
        )
        self._odds = chance.choice((0.0, 0.01, 0.05))
        self._cut_odds = chance.choice((0.0, 0.05, 0.3))
        refusing = chance.choice((0.0, 0.5, 0.9))
        self.kube.refuses = lambda: chance.random() < refusing
        self.kube.request("a", "{}")
        self.start()
        for _ in range(steps):
            self.run(chance.choice((0.3, 3.0, 20.0, 60.0, 200.0)))
            self._happen()

    _odds = _cut_odds = 0.0

    def _happen(self) -> None:
        chance = self.chance
        what = chance.choice(
            (
                *("kill", "kill", "second", "service", "service", "service", "api", "reboot"),
                *("clock", "room", "class", "request", "request", "lose", "jump", "uncordon"),
                *("lead", "lead"),
                *("second", "critical", "critical", "group", "group", *("other",) * self.both),
            )
        )
        if what == "kill" and self.controllers:
            self.kill(chance.choice(self.controllers))
            if not self.controllers or chance.random() < 0.5:
                self.start()
        elif what == "second" and len(self.controllers) < 2:
            self.start()
        elif what == "lead" and self.controllers:
            controller = chance.choice(self.controllers)
            controller.is_leader = not controller.is_leader
        elif what == "service":
            service = self.services[chance.choice(NAMES)]
            service.is_up = not service.is_up
            service.restart()
        elif what == "api":
            self.kube.is_down = not self.kube.is_down
        elif what == "reboot":
            self.kube.reboot(chance.choice(NAMES))
        elif what == "clock":
            self.ahead += chance.choice((-7200.0, 7200.0, 90000.0, -90000.0))
            self.has_stepped = True
        elif what == "room":
            service = self.services[chance.choice(NAMES)]
            service.free_bytes = chance.choice((0, 1 << 30, 100 << 30))
        elif what == "class":
            service = self.services[chance.choice(("b", "c"))]
            service.classes ^= {chance.choice(("linear", "thin"))}
        elif what == "request":
            self.kube.request("a", chance.choice(self.requests))
        elif what == "other":
            # Nodes that are evacuated to each other.
            self.kube.request("b", chance.choice(self.requests))
        elif what == "group":
            self.has_lost_group = True
            service = self.services[chance.choice(NAMES)]
            (service.find_group if service.missing_group else service.lose_group)()
        elif what == "lose":
            # The area of a snapshot is full.
            for volume in self.services["a"].volumes.values():
                for snapshot in volume.snapshots.values():
                    snapshot.is_lost = snapshot.is_lost or chance.random() < 0.3
        elif what == "jump":
            # All is suspended for a while, such as a controller's machine.
            self.baton.now += chance.choice((20.0, 40.0, 400.0))
        elif what == "uncordon":
            self.kube.uncordon(chance.choice(NAMES))
        elif what == "critical":
            self._strike()

    def _strike(self) -> None:
        """Kill the controllers, or restart a service, right after the next call of a kind."""
        chance = self.chance
        call = chance.choice(
            ("commit", "FinishReceive", "AbortReceive", "undo", "hold", "WithdrawReceive", "begin")
        )
        struck: list[str] = []

        def called(node: str, name: str) -> None:
            if name == call and not struck:
                struck.append(node)

        self.moves.called = called
        writes = len(self.kube.writes)
        more = chance.randint(1, 8) if chance.random() < 0.5 else 1000
        self.run(300.0, lambda: bool(struck) or len(self.kube.writes) >= writes + more)
        self.moves.called = lambda _node, _name: None
        what = chance.choice(("kill", "kill", "service", "request"))
        if what == "kill":
            for controller in list(self.controllers):
                self.kill(controller)
            self.start()
        elif what == "service" and struck:
            self.services[struck[0]].restart()
        elif what == "request":
            self.kube.request("a", chance.choice(self.requests))

    # Whether both nodes with volumes get requests.
    both = 0
    requests: tuple[str | None, ...] = ("{}", "{}", '{"to": ["b"]}', '"stop"', None, '"undo"')

    def calm(self) -> None:
        """All is well from now on, with one controller."""
        for controller in list(self.controllers):
            self.kill(controller)
        for service in self.services.values():
            service.is_up = True
            if service.missing_group:
                service.find_group()
            service.classes = {"linear", "thin", "sealed"}
            service.free_bytes = 100 << 30
        self.kube.is_down = False
        self.kube.fails = lambda: ""
        self.kube.refuses = lambda: False
        self.moves.fails = self.moves.cuts = lambda: False
        self.start()

    # What must be so

    @property
    def noted(self) -> Sequence[Any]:
        found = [volume["metadata"] for volume in self.kube.all("persistentvolumes")]
        return [about["name"] for about in found if f"{_KEY}/moves" in about.get("annotations", {})]

    def is_settled(self, *, left: str = "") -> str:
        """Why the cluster is not settled yet; empty if it is. No volume is on the node `left`."""
        kube = self.kube
        for name, claims in self.kube.replicas.items():
            pod = kube.objects["pods"].get(("shop", name))
            if pod is None or pod["status"]["phase"] != "Running":
                return f"{name} does not run: {pod}"
            for claim in claims:
                if (problem := self._claim_problem(claim)) != "":
                    return problem
                if kube.place_of(claim) == left:
                    return f"{claim} is on {left}"
        every = {claim for own in kube.replicas.values() for claim in own}
        if len(kube.all("persistentvolumes")) != len(every):
            return f"volumes {sorted(name for _, name in kube.objects['persistentvolumes'])}"
        return ""

    def _claim_problem(self, claim: str) -> str:
        found, volume = self.kube.claim(claim), self.kube.volume_of(claim)
        if found is None or volume is None or found["status"]["phase"] != "Bound":
            return f"{claim} is not bound"
        if volume["spec"]["claimRef"]["uid"] != found["metadata"]["uid"]:
            return f"{claim} is bound to another's"
        if volume["spec"]["persistentVolumeReclaimPolicy"] != self.kube.policies[claim]:
            return f"the policy of {claim} is {volume['spec']['persistentVolumeReclaimPolicy']}"
        annotations = volume["metadata"]["annotations"]
        if any(key.startswith("move.") for key in annotations):
            return f"{claim} has {annotations}"
        return ""

    def left_over(self, *, quarantined: bool) -> str:
        """What is on nodes and is no claim's volume, but what is under quarantine, if allowed."""
        own = {
            volume["spec"]["csi"]["volumeHandle"]: volume
            for volume in self.kube.all("persistentvolumes")
        }
        noted = {
            note["volume"]
            for volume in own.values()
            for note in json.loads(
                volume["metadata"].get("annotations", {}).get(f"{_KEY}/moves", "[]")
            )
        }
        for service in self.services.values():
            for volume in service.volumes.values():
                if volume.volume_id in own and volume.is_usable:
                    if any("-move-" in one for one in volume.snapshots):
                        return f"{volume.volume_id} has {list(volume.snapshots)}"
                    if volume.move_to:
                        return f"{volume.volume_id} moves to {volume.move_to}"
                    continue
                is_kept = volume.state == tag.MOVED and volume.volume_id in noted
                if volume.is_coming and self.has_lost_group:
                    # An undo could not remove it. The next move there does.
                    continue
                if not (quarantined and is_kept):
                    return f"{service.name} has {volume}"
        if not quarantined and noted:
            return f"notes of {noted}"
        return ""

    def settle(self, condition: Callable[[], str], seconds: float = 7200.0) -> None:
        """Wait until a condition has no problem any more."""
        self.run(seconds, lambda: not condition())
        if problem := condition():
            shown = [
                (one.node, one.kind, one.problem, [(u.name, u.stage, u.problem) for u in one.units])
                for controller in self.controllers
                for one in controller.progress.snapshot()
            ]
            raise Violation(f"{self.seed}: {problem}; {shown}; {self.kube.said[-5:]}")


@contextmanager
def history(seed: str, *, make: bool = True) -> Iterator[History]:
    """A history, and the program's clocks and connections in it."""
    made = History(seed, make=make)
    with pytest.MonkeyPatch.context() as patched:
        connection = type("Bound", (Connection,), {"kube": made.kube})
        patched.setattr(objects, "Connection", connection)
        patched.setattr(objects, "sleep", made.baton.sleep)
        patched.setattr(rebinding, "sleep", made.baton.sleep)
        patched.setattr(move, "time", SimpleNamespace(monotonic=lambda: made.baton.now))
        patched.setattr(move, "_KEEP_SECONDS", 1e6)
        try:
            yield made
        finally:
            made.end()
