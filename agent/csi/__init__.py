"""The gRPC services on the CSI socket: parse requests, lock volumes, call operations, answer."""
