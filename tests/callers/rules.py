"""How each caller takes each code: the table of callers.md.

The fake callers act by it, and the recorded requests are judged by it.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KUBELET = "kubelet"
SIDECARS = "every sidecar"
TABLE = Path(__file__).with_name("callers.md")


class Reaction(enum.Enum):
    """What a caller does after an answer."""

    GOES_ON = "goes on"
    REPEATS = "repeats it, and gives up nothing"
    RESCHEDULES = "gives the node up: the scheduler chooses again"
    STICKS = "repeats it on the same node for ever"
    RETRIES_SLOWLY = "repeats it on the same node each five minutes, for ever"
    FORGETS = "takes it for not done; repeats it while it is wanted, and undoes nothing"
    BLOCKS = "repeats it; a pod that starts waits for it in ContainerCreating"
    INFEASIBLE = "marks the claim, and goes on without"
    INSISTS = "repeats it with the same size, also after the claim was made smaller"
    MARKS = "marks the claim; a pod that starts waits, as the resizer takes the mark away"
    PERSISTS = "repeats it with the same class, also after the claim got another"
    STAYS = "goes on with the size that there is; asks again when the volume is mounted next"
    KEEPS = "keeps the capacity object as it is, or has none"
    LEAVES = "leaves what is attached as it is, and asks again later"
    ENDS = "ends, and is started again"

    @property
    def is_a_stop(self) -> bool:
        """Whether the caller comes no further by itself to what it is for."""
        going_on = (
            *(Reaction.GOES_ON, Reaction.REPEATS, Reaction.RESCHEDULES),
            *(Reaction.INSISTS, Reaction.PERSISTS),
        )
        return self not in going_on


# "Still in progress" to all of them: gRPC's own codes, and CSI's "operation pending for volume". To
# kubelet and the snapshotter gRPC's "out of resources for now" is, too.
NOT_FINAL = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED")


@dataclass(frozen=True)
class Rule:
    """One call of one caller: what it fills, and how it takes each code that is not OK."""

    caller: str
    method: str
    fields: tuple[str, ...]
    codes: Mapping[str, Reaction]
    otherwise: Reaction
    # The reason of the Warning event that comes with each error, where there is one.
    warning: str

    def reaction(self, code: str) -> Reaction:
        return Reaction.GOES_ON if code == "OK" else self.codes.get(code, self.otherwise)


def _parse(row: str) -> Rule:
    caller, method, fields, taken, warning, _source = row.strip("| ").split(" | ")
    # `ABORTED, CANCELLED: a reaction; all others: another`; a reaction may have either mark in it.
    words = re.split(r"(?:^|; )([A-Z_]+(?:, [A-Z_]+)*|all(?: others)?): ", taken)
    reactions = {
        code: Reaction(text)
        for codes, text in zip(words[1::2], words[2::2], strict=True)
        for code in codes.split(", ")
    }
    otherwise = reactions.pop("all" if "all" in reactions else "all others")
    filled = tuple(re.findall(r"`(\w+)`", fields))
    return Rule(caller, method.strip("`"), filled, reactions, otherwise, warning.strip("-"))


RULES = tuple(map(_parse, re.findall(r"^\| .* \| `\w+` \|.*$", TABLE.read_text(), re.MULTILINE)))


def of(method: str, caller: str = "") -> Rule:
    """The rule of a call; its usual caller's, where none is named."""
    return next(
        one for one in reversed(RULES) if one.method == method and caller in ("", one.caller)
    )
