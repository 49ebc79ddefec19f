"""The floors that the product stands on (docs/design.md)."""

# From the ground up. A module imports from its own floor and those below it. The daemon and the
# command line share one, and neither imports an extra: agent/core/extras.py names these.
FLOORS = (
    ("mount",),
    ("lvm",),
    ("agent.core",),
    ("agent.settings",),
    ("agent.requests",),
    ("agent.work",),
    ("agent.groups",),
    ("agent.volumes",),
    ("agent.operations",),
    ("agent.csi",),
    ("agent.daemon", "agent.cli"),
    ("agent.extras",),
)
