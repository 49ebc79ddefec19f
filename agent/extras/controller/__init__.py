"""One controller for a cluster: sends each call of the sidecars to the node that it is about."""
