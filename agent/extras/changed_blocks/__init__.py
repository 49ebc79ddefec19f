"""Allocated and changed blocks of snapshots (CSI SnapshotMetadata)."""
