"""Bounds and times of a gateway that no deployment sets; tests shorten them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Tuning"]


class Tuning(NamedTuple):
    """Times in seconds, sizes in bytes."""

    inline_bytes: int = 2048
    """Bodies up to this size are checked and tokenized on the loop: less work than a hop to a thread."""
    threads: int = 2
    write_high: int = 1 << 16
    """A stream whose socket has more unsent bytes than this is behind: its deltas coalesce."""
    write_low: int = 1 << 14
    pending_bytes: int = 4 << 20
    """Coalesced bytes beyond which a stream that is behind is cut, and unsent ones of a native connection
    beyond which it is not asked any more."""
    slow_seconds: float = 30.0
    """A stream that stays behind for so long is cut."""
    ping_seconds: float = 5.0
    """A stream that has nothing to say sends a comment this often."""
    tick_seconds: float = 0.05
    body_seconds: float = 60.0
    unplaced_bytes: int = 1 << 16
    """Bodies up to this size are read before their request takes a place."""
    preface_seconds: float = 30.0
    records_per_drain: int = 64
    frames_per_connection: int = 1024
    """Requests one native connection may have open."""
