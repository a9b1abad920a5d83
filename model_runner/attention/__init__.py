"""Attention over the paged K/V cache, by backends of one interface."""

from __future__ import annotations

from model_runner.attention.backend import AttentionBackend, AttentionShape
from model_runner.attention.choice import BACKENDS, Choice, choose, create_backend, order_of

__all__ = ["BACKENDS", "AttentionBackend", "AttentionShape", "Choice", "choose", "create_backend", "order_of"]
