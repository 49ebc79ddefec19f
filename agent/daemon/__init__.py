"""The process of the service: start-up, gRPC server, metrics, registration with kubelet."""
