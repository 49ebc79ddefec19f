"""LVM: commands, reports, layouts, labels on disks, device-mapper. No gRPC, no policy."""
