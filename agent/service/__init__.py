"""The process: its parts put together, its socket, who finds and watches it."""
