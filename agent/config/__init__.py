"""What the operator decides: settings, classes and groups."""
