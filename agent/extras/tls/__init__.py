"""Mutual TLS between the controller and the nodes."""
