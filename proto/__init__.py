"""The wire: CSI 1.13, kubelet's plugin registration, and what protoc makes of them."""
