"""Evacuation: volumes and claims leave a node that is drained, or that is lost."""
