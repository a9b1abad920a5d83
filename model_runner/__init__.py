"""The engine: scheduler, batch, models, attention and sampling, without gRPC and without the books."""
