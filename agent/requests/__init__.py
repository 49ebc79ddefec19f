"""What callers ask: requests and parameters, checked when they are read."""
