"""`carver node evacuate` and `carver node evacuations`, from the words to the annotation."""

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from api_server import CLAIMS, NODES, PODS, VOLUMES, status
from csi_client import Client
from evacuating import KEY, Api, Site, annotation

from agent.cli import main
from agent.extras.evacuation.evacuation_calls import text_of_progress
from agent.extras.evacuation.evacuation_request import Annotations, NoSuchNode, Request
from agent.extras.evacuation.plan import Plan, PlannedVolume, Unit
from agent.extras.evacuation.progress import Progress, Stage
from agent.settings.settings import DRIVER_NAME
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import EvacuationStub

NODE = "node-00000"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(site: Site, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; returns its exit code, its output, and its errors."""

    def carver_node(*words: str) -> tuple[int, str, str]:
        code = main.main(["node", *words, "--endpoint", str(site.config.endpoint)])
        out, err = capsys.readouterr()
        return code, out, err

    return carver_node


def test_a_dry_run_shows_the_plan_and_changes_nothing(run: Run, site: Site, api: Api) -> None:
    api.pod("db-0", NODE, "claim-00")
    site.nodes[1].rooms["fast"] = site.nodes[2].rooms["fast"] = (3 << 29, 4 << 20)
    site.source.snapshot("monday", 0)
    code, out, _ = run("evacuate", NODE, "--dry-run")
    assert code == 1
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("shop/")}
    assert rows["shop/claim-00"][1:] == ["1", "GiB", "fast", "node-00001", "shop/db-0"] or (
        rows["shop/claim-00"][1:3] == ["1", "GiB"]
    )
    assert out.count("stays: no node can take it") == 2
    assert f"Without --dry-run, Node {NODE} is annotated {KEY}={{}}." in out
    assert api.changes == []
    assert api.methods == {"GET"}


@pytest.mark.parametrize("sizes", [(6, 50)])
def test_a_dry_run_of_fifty_volumes_reads_a_few_lists_and_writes_nothing(
    run: Run, site: Site, api: Api
) -> None:
    for number in range(50):
        api.pod(f"pod-{number:02}", NODE, f"claim-{number:02}")
    objects = json.dumps(api.objects, sort_keys=True)
    for node in site.nodes:
        node.requested.clear()
    begun = time.monotonic()
    code, out, _ = run("evacuate", NODE, "--dry-run")
    seconds = time.monotonic() - begun
    assert code == 0
    assert sum(line.startswith("shop/") for line in out.splitlines()) == 50
    # The Node that is named, lists of Nodes, PersistentVolumes and claims, and three pages of pods.
    assert Counter(path for path, _ in api.asked) == {
        f"{NODES}/{NODE}": 1,
        **dict.fromkeys((NODES, VOLUMES, CLAIMS), 1),
        PODS: 3,
    }
    assert (api.changes, api.methods) == ([], {"GET"})
    assert json.dumps(api.objects, sort_keys=True) == objects
    called = Counter(method for node in site.nodes for method in node.requested)
    assert called == {"Moves": 6, "ListVolumes": 1, "ListSnapshots": 1, "GetCapacity": 5}
    assert seconds < 10


def test_an_evacuation_is_requested_stopped_and_taken_back(run: Run, api: Api) -> None:
    code, out, _ = run("evacuate", NODE, "--to", "node-00002", "--to", "node-00001", "--force")
    assert code == 0
    assert annotation(api, NODE) == {"to": ["node-00002", "node-00001"], "force": True}
    assert "See how far it is by: carver node evacuations" in out
    assert run("evacuate", NODE, "--stop")[0] == 0
    assert annotation(api, NODE) == "stop"
    code, out, _ = run("evacuate", NODE, "--undo")
    assert (code, annotation(api, NODE)) == (0, "undo")
    assert out.splitlines()[0] == f'Node {NODE} is annotated {KEY}="undo".'
    assert [path for path, _ in api.changes] == [f"{NODES}/{NODE}"] * 3


def test_json_has_the_whole_plan(run: Run, site: Site) -> None:
    kept = site.source.snapshot("monday", 1)
    code, out, _ = run("evacuate", NODE, "--dry-run", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["request"] == "{}"
    assert len(made["going"]) == 4
    (unit,) = [one for one in made["going"] if one["volumes"][0]["snapshots"]]
    assert unit["volumes"][0] == {
        "volume_id": site.source.handle(1),
        "claim": "shop/claim-01",
        "pv": "pv-claim-01",
        "size_bytes": str(1 << 30),
        "device_class": "fast",
        "snapshots": [kept],
    }
    assert "stay on node-00000" in unit["notes"][0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("evacuate", "nowhere"), "the cluster has no node 'nowhere' (NOT_FOUND)"),
        (("evacuate", "a/b"), "the cluster has no node 'a/b' (NOT_FOUND)"),
        (("evacuate", NODE, "--to", "nowhere"), "no node 'nowhere' (NOT_FOUND)"),
        (("evacuate", NODE, "--to", NODE), "is the node that is to be evacuated"),
        (("evacuate", NODE, "--to", "a b"), "is no name of a node (INVALID_ARGUMENT)"),
        (("evacuate", NODE, "--stop", "--force"), "do not go with --stop or --undo"),
        (("evacuate", NODE, "--undo", "--to", "x"), "do not go with --stop or --undo"),
    ],
)
def test_a_wrong_request_is_refused_and_changes_nothing(
    run: Run, api: Api, words: tuple[str, ...], expected: str
) -> None:
    code, _, err = run(*words)
    assert code == 1
    assert expected in err
    assert api.changes == []


def test_without_the_setting_nothing_is_requested(run: Run, site: Site, api: Api) -> None:
    site.calls._is_enabled = False
    for words in (("--dry-run",), ("--stop",), ()):
        code, _, err = run("evacuate", NODE, *words)
        assert code == 1
        assert "evacuations are switched off: set `evacuation`" in err
    assert api.changes == []


def test_a_request_is_removed(site: Site, api: Api) -> None:
    annotations = Annotations(site.objects, DRIVER_NAME)
    annotations.write(NODE, Request())
    assert annotation(api, NODE) == {}
    annotations.write(NODE, None)
    assert annotation(api, NODE) is None
    with pytest.raises(NoSuchNode, match="the cluster has no node 'x'"):
        annotations.write("x", None)


def test_a_node_that_does_not_answer_is_not_requested(run: Run, site: Site, api: Api) -> None:
    site.source.fails["GetPluginInfo"] = grpc.StatusCode.UNAVAILABLE
    site.ask()
    code, _, err = run("evacuate", NODE)
    assert code == 1
    assert "does not answer" in err
    assert api.changes == []
    # It can be stopped all the same.
    assert run("evacuate", NODE, "--stop")[0] == 0


def test_an_api_server_that_refuses_is_named(run: Run, api: Api) -> None:
    api.lie(NODES, *[status(403)] * 3)
    code, _, err = run("evacuate", NODE)
    assert code == 1
    assert "it answers 403" in err
    assert "(UNAVAILABLE)" in err


def test_without_a_controller_that_is_said(run: Run, site: Site) -> None:
    assert "no Carver answers at" in main_error(run, "evacuations", "--endpoint", "/nowhere")


def main_error(run: Run, *words: str) -> str:
    # The last --endpoint counts; so none is added.
    import io
    from contextlib import redirect_stderr

    out = io.StringIO()
    with redirect_stderr(out):
        assert main.main(["node", *words]) == 1
    return out.getvalue()


def test_evacuations_show_stages_rates_and_problems(run: Run, site: Site) -> None:
    assert run("evacuations")[1] == "No node is being evacuated.\n"
    site.progress.begin(NODE, "evacuate", site.view.plan(NODE, Request()))
    first, second = site.source.handle(0), site.source.handle(1)
    site.progress.unit(NODE, first, Stage.EVICTING, "refused: PodDisruptionBudget db")
    site.progress.begin_round(NODE, second, 1 << 30)
    site.progress.volume(NODE, second, Stage.COPYING, "a round was cut off")
    site.progress.unit(NODE, site.source.handle(2), Stage.MOVED)
    code, out, _ = run("evacuations")
    assert code == 0
    assert out.splitlines()[0] == ("node-00000: evacuate: 1 of 4 units done, an unknown time left")
    assert "shop/claim-00: refused: PodDisruptionBudget db" in out
    assert "shop/claim-01: a round was cut off" in out
    assert "evicting" in out
    site.progress.problem(NODE, "node-00002 does not answer")
    code, out, _ = run("evacuations", "--json")
    assert code == 1
    (node,) = json.loads(out)["nodes"]
    assert node["problem"] == "node-00002 does not answer"
    (moved,) = [one for one in node["units"] if one["stage"] == "moved"]
    assert moved["seconds_left"] == 0
    assert "seconds_left" not in node


def test_evacuations_show_what_another_controller_has_published(run: Run, site: Site) -> None:
    site.progress.begin(NODE, "evacuate", site.view.plan(NODE, Request()))
    site.progress.problem(NODE, "node-00002 does not answer")
    shown = run("evacuations", "--json")
    site.other_text = text_of_progress(site.progress)
    site.progress.end(NODE, forget=True)
    assert run("evacuations", "--json") == shown
    site.other_text = "{"
    words = ("evacuations", "--endpoint", str(site.config.endpoint))
    assert "another controller has published cannot be read" in main_error(run, *words)


def test_published_progress_fits_into_an_annotation() -> None:
    """Of very many units only the nodes are published."""
    units = [Unit((PlannedVolume(f"data@x/vol-{n}", 1, "fast"),), (), "b") for n in range(2000)]
    progress = Progress()
    progress.begin(NODE, "evacuate", Plan(NODE, tuple(units)))
    progress.problem(NODE, "node-00002 does not answer")
    text = text_of_progress(progress)
    assert len(text) < 1000
    assert json.loads(text)["nodes"][0]["problem"] == "node-00002 does not answer"


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({"stop": True, "undo": True}, "stop and undo exclude each other"),
        ({"stop": True, "to": ["a"]}, "neither `to` nor `force` goes with stop or undo"),
    ],
)
def test_the_service_refuses_what_the_command_would_not_ask(
    site: Site, request_fields: dict[str, Any], expected: str
) -> None:
    with Client(site.config.endpoint) as client:
        stub = client.stub(EvacuationStub)
        with pytest.raises(grpc.RpcError, match=expected) as raised:
            stub.Evacuate(carver.EvacuateRequest(node=NODE, **request_fields))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
