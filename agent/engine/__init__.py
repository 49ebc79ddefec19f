"""One volume group: what is known of it, what is on it, and work on it in turn."""
