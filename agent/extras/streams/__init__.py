"""Volumes as streams of bytes: the format, and how a stream is written and applied."""
