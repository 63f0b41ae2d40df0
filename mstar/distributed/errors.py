"""How ranks of a group fail together."""

from __future__ import annotations

__all__ = ["CollectiveFailed", "PeerMissing"]


class PeerMissing(Exception):
    """A rank of the group did not come to the rendezvous, or stopped answering, within the bound."""


class CollectiveFailed(RuntimeError):
    """A collective did not complete: a peer has died, hangs, or made another call. Nothing is repaired."""
