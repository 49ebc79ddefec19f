"""Volumes received from elsewhere, and moved to other nodes."""
