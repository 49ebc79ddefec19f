"""What Kubernetes tells: how its API server is reached, and what it has, read and never written."""
