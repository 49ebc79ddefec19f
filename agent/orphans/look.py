"""One look for orphans: places, then volumes, then the cluster; and which were seen before.

In that order, as each comes into being after the one that is read next: no volume that is in the
report was made after the PersistentVolumes were read, and no directory before its volume.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.cluster import access, needs
from agent.cluster.lists import Lists
from agent.config.settings import Config
from agent.engine.inventory import Inventory
from agent.orphans import candidates, places
from agent.orphans.candidates import Candidate
from agent.orphans.sightings import Sightings
from mount import table
from mount.syscalls import Kernel

# Beside the socket, where Carver's other files are.
SIGHTINGS = "orphans.json"


@dataclass(frozen=True)
class Orphan:
    """A candidate, and for how long it was one at every look; `sure` after a grace of it."""

    candidate: Candidate
    seen_seconds: float
    sure: bool


class Seeker:
    """Looks for orphans. `lists` is made anew for each look: certificates and tokens change."""

    def __init__(
        self,
        config: Config,
        kernel: Kernel,
        inventory: Inventory,
        lists: Callable[[], Lists],
        sightings: Sightings,
    ) -> None:
        self._config = config
        self._kernel = kernel
        self._inventory = inventory
        self._lists = lists
        self._sightings = sightings

    def look(self) -> Sequence[Orphan]:
        """Everything that seems to be an orphan now, the sure ones first.

        Raises what a report raises, and ClusterSilent, BadConfig: then nothing is one, and nothing
        is noted.
        """
        config = self._config
        found_places = places.all_of(self._kernel, config.kubelet_dir, config.driver_name)
        known = self._inventory.read()
        wanted = needs.read(self._lists(), config.driver_name, config.node_id, config.topology_key)
        mounts = table.read(self._kernel)
        found = [
            *candidates.of_volumes(self._inventory, known, wanted),
            *places.candidates(found_places, mounts, known, config.groups, wanted),
            *candidates.of_objects(wanted),
        ]
        seen = self._sightings.note((one.key for one in found), wanted.versions)
        grace = config.orphan_grace_seconds
        orphans = [Orphan(one, seen[one.key], seen[one.key] >= grace) for one in found]
        return sorted(orphans, key=lambda one: (not one.sure, one.candidate.kind))


def seeker(config: Config, kernel: Kernel, inventory: Inventory) -> Seeker:
    """One that asks the cluster that the configuration names."""
    return Seeker(
        config,
        kernel,
        inventory,
        lambda: Lists(access.find(config.kubeconfig, os.environ)),
        Sightings(config.endpoint.parent / SIGHTINGS),
    )
