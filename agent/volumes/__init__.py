"""Contents of volume groups: volumes, snapshots, their states, devices, users, and free space."""
