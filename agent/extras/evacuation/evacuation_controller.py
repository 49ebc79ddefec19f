"""What evacuation adds to the controller: the RPCs of operators, and the tasks of the settings."""

import os
import platform
from collections.abc import Sequence

from agent.daemon.extra import Extra
from agent.extras.controller.controller_process import ClusterController


def add(controller: ClusterController) -> Sequence[Extra]:
    """Add the RPCs by which nodes are evacuated; return the tasks that the settings ask for.

    Without an API server there are no RPCs. Raises BadConfig if the settings lead to no API server,
    or do not let the controller forget deleted nodes although it is to release their claims.
    """
    return [*_evacuation(controller), *_lost_claims(controller)]


# What is imported in the functions takes memory that a controller without these settings saves.


def _evacuation(controller: ClusterController) -> Sequence[Extra]:
    config = controller.config
    if config.nodes_file is not None:
        return []
    from agent.extras.evacuation.evacuation_calls import EvacuationCalls, text_of_progress
    from agent.extras.evacuation.progress import Progress
    from agent.extras.kubernetes import access
    from agent.extras.kubernetes.lease import Lease, LeaseTask
    from agent.extras.kubernetes.objects import Lists, Objects

    server, progress = access.find(config.kubeconfig, os.environ), Progress()
    objects = Objects(server)
    lease = Lease(
        *(objects, access.namespace(), f"{config.driver_name}-evacuation", platform.node()),
        key=f"evacuate.{config.driver_name}/progress",
        text=lambda: text_of_progress(progress),
    )
    calls = EvacuationCalls(
        *(config, controller.nodes, objects, Lists(server), progress),
        other_text=lambda: lease.other_text,
    )
    controller.handlers.append(calls.handler())
    if not config.evacuation:
        return []
    from agent.extras.evacuation.evacuator import EvacuatorTask

    task = EvacuatorTask(
        *(config, controller.nodes, controller.moves, server, progress),
        is_leader=lambda: lease.is_held,
    )
    return [LeaseTask(lease), task]


def _lost_claims(controller: ClusterController) -> Sequence[Extra]:
    config = controller.config
    if not config.release_lost_claims:
        return []
    from agent.extras.evacuation.lost_claims import LostClaimsTask
    from agent.extras.kubernetes import access
    from agent.extras.kubernetes.objects import Lists, Objects

    server = access.find(config.kubeconfig, os.environ)
    clients = Objects(server), Lists(server)
    return [LostClaimsTask(config.driver_name, controller.nodes, controller.record, *clients)]
