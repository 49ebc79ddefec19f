"""The choice of the node for ControllerPublishVolume and ControllerUnpublishVolume.

A volume is attached to the node that has its disks, or to no node. Detaching fails, and is retried,
until a node has been down for a minute; the volume then counts as detached. No other node can use
the volumes on that node's disks, so nothing depends on the node's record of attached volumes.
"""

import logging

from agent.core import codes, errors
from agent.core.ids import VolumeId
from agent.extras.controller.nodes import Node, Nodes, Refused
from proto import csi_pb2 as csi

_log = logging.getLogger(__name__)

# Time, in seconds, for which a node must have been silent before its volumes count as detached. The
# time is longer than an upgrade of Carver on the node takes. Kubernetes' attach/detach controller
# detaches after six minutes, or as soon as an administrator marks the node as out of service.
_PATIENCE_SECONDS = 60.0


async def to_attach(nodes: Nodes, request: csi.ControllerPublishVolumeRequest) -> Node:
    """Return the node to which a ControllerPublishVolume call is to be sent.

    Raises Refused if the cluster has no node of the request's id, if the volume is on another node,
    or if the volume's node is not known or does not answer.
    """
    volume_id, node_id = request.volume_id, request.node_id
    if node_id and nodes.get(node_id) is None:
        raise _refused(errors.NoSuchNode(node_id, f"the cluster has {len(nodes)} with Carver"))
    owner = await nodes.owner(volume_id, "volume_id")
    if node_id and owner.name != node_id:
        raise _refused(errors.AttachedElsewhere(volume_id, node_id, owner.name))
    return owner


async def to_detach(nodes: Nodes, request: csi.ControllerUnpublishVolumeRequest) -> Node | None:
    """Return the node to which a ControllerUnpublishVolume call is to be sent.

    None if the volume counts as detached without a call: if the request's id is no volume id, if
    the cluster has no node of the request's node id, or if the volume is not on that node. None
    also if that node has not answered for _PATIENCE_SECONDS, and the volume's node is not known or
    does not answer. Without a node id in the request, the volume's node is returned.

    Raises Refused if the volume id is empty; in other cases also if the volume's node is not known
    or does not answer.
    """
    volume_id, node_id = request.volume_id, request.node_id
    named_node, parsed = nodes.get(node_id), VolumeId.parse(volume_id)
    if parsed is None and volume_id:
        return None
    if parsed is None or not node_id:
        return await nodes.owner(volume_id, "volume_id")
    if named_node is None:
        return None
    try:
        owner = await nodes.owner(volume_id, "volume_id")
    except Refused:
        if not named_node.may_have_more and parsed.group_uuid not in named_node.groups:
            return None
        if named_node.silent_seconds < _PATIENCE_SECONDS:
            raise
        _log.warning(
            "volume %s counts as detached from node %s, which has not answered for %.0f s",
            *(volume_id, node_id, named_node.silent_seconds),
        )
        return None
    return owner if owner is named_node else None


def _refused(error: errors.AgentError) -> Refused:
    return Refused(codes.code_of(error), str(error))
