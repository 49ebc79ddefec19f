"""How work waits: locks, the loops of background work, the pace of background I/O."""
