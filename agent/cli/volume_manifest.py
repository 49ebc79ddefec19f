"""The PersistentVolume and claim of a volume, as YAML for `kubectl apply`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.core import errors, ids, tag
from agent.requests.parameters import PREFIX
from agent.settings import values
from lvm import names
from proto import csi_pb2 as csi

# Template of the YAML for a PersistentVolume and its claim. The values are inserted as JSON, which
# is valid YAML.
_MANIFEST = """\
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {name}
  annotations:
    pv.kubernetes.io/provisioned-by: {driver}
spec:
  capacity:
    storage: {size}
  volumeMode: {mode}
  accessModes: {access_modes}
  mountOptions: {mount_options}
  # Once Delete, Kubernetes has the volume erased with its claim.
  persistentVolumeReclaimPolicy: Retain
  storageClassName: {storage_class}
  claimRef:
    apiVersion: v1
    kind: PersistentVolumeClaim
    namespace: {namespace}
    name: {claim}
  csi:
    driver: {driver}
    volumeHandle: {handle}
    fsType: {fs_type}
    volumeAttributes: {attributes}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions: {expressions}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  namespace: {namespace}
  name: {claim}
spec:
  volumeMode: {mode}
  accessModes: {access_modes}
  storageClassName: {storage_class}
  volumeName: {name}
  resources:
    requests:
      storage: {size}
"""

_Mode = csi.VolumeCapability.AccessMode.Mode
_ONCE = "ReadWriteOnce"
# Kubernetes' access modes for CSI's, as the external-provisioner maps them.
_ACCESS_MODES: Mapping["_Mode.ValueType", str] = {
    _Mode.SINGLE_NODE_WRITER: _ONCE,
    _Mode.SINGLE_NODE_MULTI_WRITER: _ONCE,
    _Mode.SINGLE_NODE_SINGLE_WRITER: "ReadWriteOncePod",
    _Mode.SINGLE_NODE_READER_ONLY: "ReadOnlyMany",
    _Mode.MULTI_NODE_READER_ONLY: "ReadOnlyMany",
}


class Manifest:
    """The PersistentVolume and claim for a logical volume, adopted or Carver's own.

    `logical` is the logical volume's name, and `persistent_volume` the recorded name of its
    PersistentVolume, empty if there is none. `claim` is the claim's namespace, a slash and the
    claim's name. If `claim` is empty, the claim gets the PersistentVolume's name in the namespace
    `default`. Raises BadField for a claim or a storage class whose name Kubernetes does not allow.
    """

    def __init__(
        self,
        driver: str,
        logical: str,
        claim: str,
        storage_class: str,
        persistent_volume: str = "",
    ) -> None:
        self._driver, self._storage_class = driver, storage_class
        # Name of the PersistentVolume: the recorded one, or the logical volume's name without the
        # prefix `vol-`. A logical volume that is adopted already has this prefix.
        self.name = persistent_volume or names.readable(ids.VOLUME_PREFIX, logical)
        if not _is_name(self.name):
            # Take a digest in place of a name that Kubernetes does not allow. `logical_volume`
            # makes a digest because of the question mark, which no logical volume's name may have.
            self.name = names.logical_volume("adopted", f"{self.name}?").replace(".", "-")
        namespace, slash, name = claim.partition("/")
        if claim and not (slash and _is_name(namespace) and _is_name(name)):
            problem = f"{claim!r} is not a namespace, / and a name of lower-case letters, digits, -"
            raise errors.BadField("--claim", problem)
        if not _is_name(storage_class):
            raise errors.BadField("--storage-class", f"{storage_class!r} is no object's name")
        self.namespace, self.claim = namespace or "default", name or self.name

    def of(self, volume: csi.Volume, capabilities: Sequence[csi.VolumeCapability] = ()) -> str:
        """The YAML for a volume.

        A volume without a file system in its volume context is a raw block volume. Access modes and
        mount options are those of `capabilities`; without any, ReadWriteOnce and no options.
        """
        context = dict(volume.volume_context)
        fs_type = context.get(f"{PREFIX}{tag.FS_TYPE}", "")
        segments = volume.accessible_topology[0].segments
        fields: dict[str, Any] = {
            "name": self.name,
            "driver": self._driver,
            "size": str(volume.capacity_bytes),
            "mode": "Filesystem" if fs_type else "Block",
            "access_modes": _access_modes(capabilities),
            "mount_options": _unique(
                flag for capability in capabilities for flag in capability.mount.mount_flags
            ),
            "storage_class": self._storage_class,
            "namespace": self.namespace,
            "claim": self.claim,
            "handle": volume.volume_id,
            "fs_type": fs_type,
            "attributes": context,
            "expressions": [
                {"key": key, "operator": "In", "values": [value]} for key, value in segments.items()
            ],
        }
        return _MANIFEST.format(**{key: json.dumps(value) for key, value in fields.items()})


def _access_modes(capabilities: Iterable[csi.VolumeCapability]) -> list[str]:
    """Return Kubernetes' access modes of a volume's capabilities; ReadWriteOnce without any."""
    return _unique(_ACCESS_MODES[one.access_mode.mode] for one in capabilities) or [_ONCE]


def _unique(texts: Iterable[str]) -> list[str]:
    """Return different texts, each at its first place."""
    return list(dict.fromkeys(texts))


def _is_name(text: str) -> bool:
    try:
        return bool(values.parse_object_name(text))
    except ValueError:
        return False
