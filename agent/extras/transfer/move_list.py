"""List the moves of a node's volumes, what the node receives, and its device classes."""

from agent.core import tag
from agent.settings.settings import Config
from agent.volumes.allocation import pool_name
from agent.volumes.records import Volume
from agent.volumes.report_age import Fresh
from agent.volumes.volume_states import EndedBy
from proto import carver_pb2 as carver


def moves(report: Fresh, config: Config) -> carver.MovesResponse:
    """Return the moves by a report of all volume groups, without the words of the moves.

    Inline volumes and volumes that are being deleted are left out.
    """
    answer = carver.MovesResponse()
    for volume in sorted(report.volumes(), key=lambda volume: str(volume.id)):
        is_moving = tag.MOVE_TO in volume.own_tags
        if volume.is_ephemeral or not (is_moving or tag.RECEIVED in volume.own_tags):
            continue
        if not volume.is_doomed:
            answer.moves.append(_move(volume))
    for device_class in config.classes:
        # The space of a thin volume is that of the pool of its class.
        pool = f"/{pool_name(device_class.name)}" if device_class.pool is not None else ""
        answer.classes.add(
            name=device_class.name,
            pool=f"{device_class.group}{pool}",
            encrypts=bool(device_class.encryption),
        )
    return answer


def _move(volume: Volume) -> carver.NodeMove:
    own_tags = volume.own_tags
    is_moving = tag.MOVE_TO in own_tags
    return carver.NodeMove(
        volume_id=str(volume.id),
        handed_over=is_moving and volume.ended_by is EndedBy.MOVER,
        node=own_tags.get(tag.MOVE_TO, ""),
        received="" if is_moving else own_tags.get(tag.RECEIVED, ""),
        size_bytes=volume.size_bytes,
        device_class=own_tags.get(tag.CLASS, ""),
        encrypted=volume.is_encrypted,
        ended=tag.MOVE_ENDED in own_tags,
    )
