"""Volume groups of this node: found on disks, cached, held, created."""
