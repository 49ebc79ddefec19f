"""The annotations of a PersistentVolume whose claim is released because its node is lost.

They are the only state of a release. `policy_key` keeps the reclaim policy that the
PersistentVolume had before; `note_key` keeps a ReleaseNote as JSON. Another annotation,
`wish_key`, is set by users, on a claim: whether the claim may be released.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent.requests.parameters import PREFIX, RELEASE_ON_NODE_LOSS

# Keys of the parameter of a StorageClass whose claims may be released.
PARAMETERS = (PREFIX + RELEASE_ON_NODE_LOSS, RELEASE_ON_NODE_LOSS)
# The text of the annotation and of the parameter that allows the release of a claim.
YES = "true"


def policy_key(driver_name: str) -> str:
    """Return the key of the annotation that keeps a PersistentVolume's former reclaim policy."""
    return f"release.{driver_name}/reclaim-policy"


def note_key(driver_name: str) -> str:
    """Return the key of the annotation that keeps the note about a PersistentVolume's release."""
    return f"release.{driver_name}/claim"


def wish_key(driver_name: str) -> str:
    """Return the key of the annotation of a claim that allows or forbids the claim's release."""
    return f"release.{driver_name}/on-node-loss"


@dataclass(frozen=True)
class ReleaseNote:
    """What a PersistentVolume's annotation says about the release of its claim.

    - `uid` is the UID of the claim.
    - `owner` is the owner of the claim, such as "StatefulSet db", and `instance` the owner's
      instance whose claims are released together, such as the pod's name.
    - `known` has the UIDs of all claims that the owner had when the release began. A claim with
      another UID was made since.
    - `pods` has the UIDs of the pods that waited for the claim when the release began.
    - `is_done` is whether the owner has another claim in use in place of the released one. `known`
      and `pods` are empty then.
    """

    uid: str
    owner: str
    instance: str
    known: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    is_done: bool = False

    @property
    def text(self) -> str:
        """The note as the text of the annotation."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, annotations: Mapping[str, Any], driver_name: str) -> "ReleaseNote | None":
        """Return the note in a PersistentVolume's annotations; None without one.

        None also if the annotation cannot be parsed.
        """
        text = annotations.get(note_key(driver_name))
        try:
            table = json.loads(str(text))
            uid, owner, instance = (table[key] for key in ("uid", "owner", "instance"))
            known, pods = (tuple(table[key]) for key in ("known", "pods"))
            is_done = table["is_done"] is True
        except (KeyError, TypeError, ValueError):
            return None
        if not all(isinstance(each, str) for each in (uid, owner, instance, *known, *pods)):
            return None
        return cls(uid, owner, instance, known, pods, is_done)
