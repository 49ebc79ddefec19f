"""Logical volumes that other CSI drivers made, recognized by their names and tags.

Sources are the drivers' public documentation and code: metal-stack/csi-driver-lvm, pkg/lvm;
topolvm, docs/crd-logical-volume.md; openebs/lvm-localpv, docs. TopoLVM names a logical volume by
the UID of its LogicalVolume object. The other drivers use the UID of the PersistentVolume.
"""

import re
from collections.abc import Collection

DRIVERS = _TOPOLVM, _OPENEBS, _CSI_DRIVER_LVM = ("topolvm", "openebs", "csi-driver-lvm")
_CSI_DRIVER_LVM_TAG = "lv.metal-stack.io/csi-lvm-driver"
_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_TOPOLVM_NAME, _OPENEBS_NAME = re.compile(_UUID), re.compile(f"pvc-{_UUID}")


def maker(name: str, tags: Collection[str]) -> str:
    """Return the name of the CSI driver that made a logical volume, by the volume's name and tags.

    The result is one of DRIVERS, or empty if none of these made the volume.
    """
    if _CSI_DRIVER_LVM_TAG in tags:
        return _CSI_DRIVER_LVM
    if _TOPOLVM_NAME.fullmatch(name):
        return _TOPOLVM
    return _OPENEBS if _OPENEBS_NAME.fullmatch(name) else ""
