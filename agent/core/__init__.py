"""What everything above stands on: errors, ids, tags, traces."""
