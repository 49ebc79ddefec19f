"""What is in a volume group: volumes and snapshots, their states, devices, users and room."""
