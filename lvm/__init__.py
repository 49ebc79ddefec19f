"""Mechanism: logical volumes, and nothing else."""
