"""What evacuation adds to the controller, for each combination of the settings."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import api_server
import pytest

from agent.core import errors, extras
from agent.daemon.extra import Extra
from agent.extras.controller.controller_process import ClusterController, Source
from agent.extras.controller.membership import Record
from agent.extras.evacuation import evacuation_controller
from agent.extras.evacuation.evacuator import EvacuatorTask
from agent.extras.evacuation.lost_claims import LostClaimsTask
from agent.extras.kubernetes import access
from agent.extras.kubernetes.lease import LeaseTask
from agent.settings.settings import Config


class _Source:
    """A source without nodes or certificates."""

    serving, certificates, questions = (), None, None

    def __init__(self, *, forgets: bool) -> None:
        self.record = Record()
        self.record.forgets = forgets


def made(config: Config, *, forgets: bool = True) -> tuple[ClusterController, list[type[Extra]]]:
    """A controller, and the kinds of the tasks that are added to it."""
    controller = ClusterController(config, cast(Source, _Source(forgets=forgets)))
    return controller, [type(task) for task in evacuation_controller.add(controller)]


@pytest.fixture
def of_cluster(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The settings of a controller with an API server, in a pod."""
    monkeypatch.setattr(access, "namespace", lambda: "carver-system")
    kubeconfig = api_server.kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9")
    return replace(config, kubeconfig=kubeconfig, nodes_file=None)


def test_it_is_found_by_the_list_of_extras() -> None:
    assert ("evacuation", evacuation_controller) in extras.modules("controller")


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("evacuates", [False, True])
def test_each_setting_adds_its_task(of_cluster: Config, *, evacuates: bool, releases: bool) -> None:
    config = replace(of_cluster, evacuation=evacuates, release_lost_claims=releases)
    controller, tasks = made(config)
    assert tasks == [LeaseTask, EvacuatorTask] * evacuates + [LostClaimsTask] * releases
    assert len(controller.handlers) == 1


@pytest.mark.parametrize("evacuates", [False, True])
def test_nothing_is_added_without_an_api_server(
    of_cluster: Config, tmp_path: Path, *, evacuates: bool
) -> None:
    config = replace(of_cluster, nodes_file=tmp_path / "nodes", evacuation=evacuates)
    controller, tasks = made(config)
    assert tasks == []
    assert controller.handlers == []


def test_claims_are_not_released_while_no_node_is_forgotten(of_cluster: Config) -> None:
    with pytest.raises(errors.BadConfig, match="needs forget_deleted_nodes"):
        made(replace(of_cluster, release_lost_claims=True), forgets=False)
