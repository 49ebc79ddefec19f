"""The services on the socket: parse, hold the volume, call policy, answer."""
