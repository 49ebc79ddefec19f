"""What is wrong: with a volume, with the node, with the service."""
