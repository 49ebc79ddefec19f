"""Mechanism: file systems and mounts, and nothing else."""
