"""What the operator decides: settings and classes, and the live record of both."""
