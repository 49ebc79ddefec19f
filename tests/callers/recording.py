"""What real callers sent: files of tests/data, one call a line, as they ended.

`real-callers` was recorded in Carver's own debug log while Kubernetes 1.36's kubelet,
external-provisioner 6.3, -resizer 2.2 and -snapshotter 8.6 served the upstream external-storage
suite on one linear class, and claims by hand: with file systems and raw, with subPath, fsGroup and
mount options, two pods on a claim, ReadWriteOncePod, clones, snapshots and restores, generic
ephemeral volumes, growth.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from agent.settings.settings import TOPOLOGY_KEY

_DATA = Path(__file__).parents[1] / "data"
KUBELET_DIRECTORY = "/var/lib/kubelet"
CLASS = "default"
DEVICE_CLASS = "carver/class"
# So that some of them fit a test's disks; an ext4 of this size is one still.
_LEAST_BYTES = 32 << 20
_SCALE = 16
_MADE_BY = {"CreateVolume": "vol-", "CreateSnapshot": "snap-"}


@dataclass(frozen=True)
class Recorded:
    """One call as it was made, and what Carver answered then."""

    t: float
    method: str
    code: str
    request: Mapping[str, Any]
    error: str = ""

    @property
    def volume(self) -> str:
        """The logical volume or snapshot that it is about; of a snapshot's making, the volume."""
        if self.method == "CreateVolume":
            return f"vol-{self.request['name']}"
        for key in ("volume_id", "source_volume_id", "snapshot_id"):
            if key in self.request:
                return name_of(self.request[key])
        return ""

    @property
    def makes(self) -> str:
        prefix = _MADE_BY.get(self.method)
        return "" if prefix is None else prefix + str(self.request["name"])

    @property
    def overlapped(self) -> bool:
        """Whether another call on the volume was at work then."""
        return "is in progress" in self.error or "is in use" in self.error

    @property
    def is_of_block(self) -> bool:
        return "/volumeDevices/" in str(self.request.get("target_path", ""))


def name_of(identity: str) -> str:
    """The logical volume that an id is of."""
    return identity.partition("/")[2]


@dataclass(frozen=True)
class Recording:
    """What one node's Carver was asked; `node` is that node, of perhaps several in the requests."""

    file: Path
    node: str

    def read(self) -> tuple[Recorded, ...]:
        return _read(self.file)

    def of_volumes(self, prefixes: tuple[str, ...]) -> tuple[Recorded, ...]:
        """Those about some volumes, about their snapshots, and about nothing in particular."""
        every = self.read()
        of_them = [one for one in every if not one.volume or one.volume.startswith(prefixes)]
        snapshots = {one.makes for one in of_them if one.method == "CreateSnapshot"}
        return tuple(one for one in every if one in of_them or one.volume in snapshots)


@cache
def _read(file: Path) -> tuple[Recorded, ...]:
    return tuple(Recorded(**json.loads(line)) for line in file.read_text().splitlines())


# By name. A recording of a cluster with a controller is what one of its nodes was asked; group
# snapshots are not translated. A further one also has its numbers in test_replay.py.
RECORDINGS = {
    "real-callers": Recording(_DATA / "real-callers.jsonl", "carver-lab"),
    "central-callers": Recording(_DATA / "central-callers.jsonl", "carver-node-2"),
}


@dataclass(frozen=True)
class Translation:
    """From the recorded machine to the one of the test: its node, directory, ids and sizes.

    Other nodes of a recorded cluster keep their names.
    """

    recorded_node: str
    node: str
    kubelet: Path
    # What was made here, by the recorded logical volume's name.
    ids: dict[str, str]

    def request(self, recorded: Recorded, kind: Any) -> Any:
        return json_format.ParseDict(self._here(recorded.request), kind())

    def size_bytes(self, recorded: int) -> int:
        """Smaller, in the same relation to all others."""
        return max(_LEAST_BYTES, recorded // _SCALE)

    def _here(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {one: self._here(inner, one) for one, inner in value.items()}
        if isinstance(value, list):
            return [self._here(one, key.removesuffix("s")) for one in value]
        if key == "required_bytes":
            return str(self.size_bytes(int(value)))
        if key == TOPOLOGY_KEY:
            return self.node if value == self.recorded_node else value
        if key == DEVICE_CLASS:
            return CLASS
        if key == "fs_type":
            # xfs wants 300 MiB (mkfs.xfs(8)).
            return "ext4" if value == "xfs" else value
        if key.endswith("_id"):
            return self.ids[name_of(value)]
        if isinstance(value, str):
            return value.replace(KUBELET_DIRECTORY, str(self.kubelet), 1)
        return value
