"""Volumes as streams of bytes."""
