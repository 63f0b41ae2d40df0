"""What can be wrong with a graph, and with what is asked of its state."""

from __future__ import annotations

__all__ = ["GraphError", "WalkStateError"]


class GraphError(ValueError):
    """A model's declaration contradicts itself; it is found when the graph is built, before any request."""


class WalkStateError(RuntimeError):
    """What was reported about a slot does not fit the state its walk is in; nothing of it was applied."""
