"""The processes: gRPC servers and clients, configuration, metrics, health and the `octavo` command."""
