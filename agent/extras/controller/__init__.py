"""One controller for a cluster: passes each call of the sidecars on to the node of its volume."""
