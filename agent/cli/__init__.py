"""The command `carver`."""
