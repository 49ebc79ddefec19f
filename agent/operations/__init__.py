"""What Carver does with volumes: one file for one use case."""
