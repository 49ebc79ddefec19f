"""What all other packages of the agent stand on: errors, ids, tags, traces."""
