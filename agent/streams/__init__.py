"""Volumes as streams of bytes: the form, and how devices are read into it and written from it."""
