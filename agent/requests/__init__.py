"""Requests and parameters of callers, checked when they are read."""
