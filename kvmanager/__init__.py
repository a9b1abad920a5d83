"""The books of a paged KV cache: pure Python, without gRPC, torch or a clock of its own."""
