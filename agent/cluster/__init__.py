"""What Kubernetes tells, and how it is asked; written is only what re-points a claim."""
