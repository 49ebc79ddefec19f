"""The extra `transfer`: send and receive volumes as streams, and move them to other nodes."""
