"""The configuration: settings and device classes, and the object that holds both."""
