"""The command line `carver`: commands, their arguments, and their output."""
