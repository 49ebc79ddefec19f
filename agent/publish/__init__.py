"""Volumes in use: staged, published, formatted, inline."""
