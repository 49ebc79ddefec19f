"""Volumes that come from elsewhere, and go elsewhere: what of that is the service's."""
