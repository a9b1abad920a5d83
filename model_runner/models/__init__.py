"""Decoders of language models."""
