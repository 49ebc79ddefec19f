"""Volumes and snapshots as objects: made, found, listed, copied, changed, deleted."""
