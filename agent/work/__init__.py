"""How work waits and takes turns: locks, the loops of background work, the pace of I/O."""
