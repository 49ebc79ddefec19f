"""What a stream says of the volume that it is of, checked: the facts of the volume that comes."""

import uuid
from collections.abc import Mapping

from agent import errors, fact
from agent.config.classes import DeviceClass
from agent.requests import keys
from agent.requests.capabilities import BLOCK, MOUNT
from agent.requests.parameters import Parameters
from agent.streams.form import Header
from agent.volumes import plan
from lvm import report, tags
from mount import filesystem, luks

# What of a volume's facts goes with it: the rest is its node's affair, or is made anew.
TOLD = (
    *(fact.ACCESS, fact.CAPABILITIES, fact.FORMATTED, fact.HEADER, fact.SEALED),
    *(*keys.PARAMETERS, fact.PVC, fact.NAMESPACE, fact.PV),
)


def facts_of(
    name: str, one: DeviceClass, header: Header, size_bytes: int, group: report.Group
) -> dict[str, str]:
    """The facts of a volume that begins to come; what is wrong with the header's is told."""
    told = {key: value for key, value in header.facts.items() if key in TOLD}
    access = told.get(fact.ACCESS, BLOCK)
    if access not in (BLOCK, MOUNT):
        raise errors.NotAllowed("stream.facts[access]", access, (BLOCK, MOUNT))
    given = {keys.PARAMETER_PREFIX + key: told[key] for key in keys.PARAMETERS if key in told}
    given[keys.PARAMETER_PREFIX + fact.CLASS] = one.name
    parameters = Parameters.from_proto(given, "stream.facts")
    if parameters.fs_type:
        parameters.check_for(parameters.fs_type, "stream.facts")
    _check_encryption(one, told, header.size_bytes)
    formatted = told.get(fact.FORMATTED, "")
    if formatted and formatted not in filesystem.FILE_SYSTEMS:
        raise errors.NotAllowed("stream.facts[formatted]", formatted, filesystem.FILE_SYSTEMS)
    facts = {
        **told,
        fact.CLASS: one.name,
        fact.NAME: name,
        fact.STATE: fact.RECEIVING,
        fact.SIZE: str(size_bytes),
        fact.LAYOUT: str(one.layout),
        fact.ACCESS: access,
        fact.RECEIVED: header.volume_id,
        fact.INTO: header.chain,
        fact.OFFSET: "0",
        **({fact.RELEASE: header.release} if header.release else {}),
        **plan.of_class(one, size_bytes, group),
    }
    for key, value in facts.items():
        if not tags.fits(key, value):
            raise errors.BadField(f"stream.facts[{key}]", "is too long to be kept in an LVM tag")
    return facts


def _check_encryption(one: DeviceClass, told: Mapping[str, str], size_bytes: int) -> None:
    """Raise BadField where a stream is not as encrypted as its class, or does not tell how."""
    sealed, length = told.get(fact.SEALED, ""), told.get(fact.HEADER, "")
    if fact.ENCRYPTION not in told:
        if one.encryption:
            why = f"class {one.name} encrypts, and what comes is not encrypted; take another class"
            raise errors.BadField("stream.facts[encryption]", why)
        if sealed or length:
            raise errors.BadField("stream.facts[header]", "is of what is not encrypted")
        return
    if not (length.isdecimal() and luks.METADATA_BYTES < int(length) < size_bytes):
        raise errors.BadField(
            "stream.facts[header]",
            f"{length!r} are not the bytes that an encrypted volume of {size_bytes} begins with",
        )
    if not sealed:
        return
    try:
        uuid.UUID(sealed)
    except ValueError:
        raise errors.BadField("stream.facts[sealed]", f"{sealed!r} is no UUID") from None
