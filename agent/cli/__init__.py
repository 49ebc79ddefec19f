"""The command line of the command `carver`: arguments, verbs and output."""
