"""What of a snapshot is allocated, and what changed between two: read from LVM's own metadata."""
