"""The books of a paged KV cache: pure Python, without gRPC, torch or a clock of its own."""

from kvmanager.manager import KvManager, Opening
from kvmanager.pool import Pool

__all__ = ["KvManager", "Opening", "Pool"]
