"""Volumes and objects of the cluster that are no longer needed."""
