"""The extra `orphans`: find volumes, and objects of the cluster, that are no longer needed."""
