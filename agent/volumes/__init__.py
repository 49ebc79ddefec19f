"""The contents of a volume group: volumes, snapshots, their states, devices, users, free space."""
