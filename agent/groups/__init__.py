"""Volume groups of this node: found on disks, cached, locked and created."""
