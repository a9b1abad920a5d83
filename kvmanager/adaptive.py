"""Stand-in."""

from kvmanager.lru import LruEviction


class AdaptiveEviction(LruEviction): ...
