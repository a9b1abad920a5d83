"""How much of an answer may wait for its client, and for how long."""

from __future__ import annotations

MAX_UNREAD = 8192
"""Entries of a stream (tokens and log-probabilities) that may wait to be read before its request pauses."""
RESUME_SHARE = 4
"""A paused request goes on when no more than one part in so many still waits."""
CHUNK_ENTRIES = 1024
"""Where a chunk that is made of several ends: about 16 KiB on the wire."""
SLOW_READER_SECONDS = 60.0
"""How long a client may take nothing of what is there for it."""
