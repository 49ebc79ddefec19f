"""The process: start, server, metrics, registration."""
