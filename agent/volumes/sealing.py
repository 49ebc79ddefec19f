"""Headers of encrypted volumes: how much of a logical volume they take, beside a claim's.

cryptsetup makes headers of 16 MiB by itself, with 31 key slots more than a volume needs. 4 MiB hold
two copies of 16 KiB, fifteen slots of 252 KiB, and room for what a re-encryption keeps there. The
data begin where a stripe, or a chunk of the thin pool, begins: what a file system lays out by
stripes lies on stripes, and a chunk that it discards is one of the pool's.
"""

from agent import fact
from agent.config.classes import DeviceClass
from agent.engine.allocation import Carving, Thin
from lvm import report

LEAST_BYTES = 4 << 20
# lvmraid(7), where a class says nothing.
_STRIPE_BYTES = 64 << 10
# Larger chunks would cost more than they save.
_MOST_UNIT_BYTES = 64 << 20


def header_bytes(one: DeviceClass, carving: Carving, group: report.Group) -> int:
    """How much of a new volume of a class its header takes; 0 where it is not encrypted."""
    if not one.encryption:
        return 0
    unit = one.layout.stripes * (one.layout.stripe_size_bytes or _STRIPE_BYTES)
    if isinstance(carving, Thin):
        unit = carving.pool(group).chunk_size_bytes
    if unit > _MOST_UNIT_BYTES:
        return LEAST_BYTES
    return -(-LEAST_BYTES // unit) * unit


def facts(header_bytes: int) -> dict[str, str]:
    """What is kept of it."""
    return {fact.HEADER: str(header_bytes)} if header_bytes else {}
