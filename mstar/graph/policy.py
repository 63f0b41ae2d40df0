"""ChunkingPolicy: what a model allows to be done with the tokens of one (node, walk).

It is declared on the model, not on the code that runs the node, because the graph is built from it: a
chunkable node runs inside a chunk Loop, long before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar.graph.errors import GraphError

__all__ = ["NO_CHUNKING", "ChunkingPolicies", "ChunkingPolicy"]


@dataclass(frozen=True, slots=True)
class ChunkingPolicy:
    """What one (node, walk) allows. Raises GraphError for a budget below 1.

    ``max_batch_tokens`` is the model's own budget of tokens for a step of that walk, None for none.
    ``chunkable`` rows may be cut: a prefix of the input runs in one step and the rest in later ones.
    ``per_chunk_outputs`` are the outputs that leave with every chunk; the others leave with the final
    one only. On a node with ``can_override_mixed_max_tokens`` the budget of a walk also caps that
    walk's rows within a step of the combined walk that it is part of.
    """

    max_batch_tokens: int | None
    chunkable: bool
    per_chunk_outputs: frozenset[str] = frozenset()
    can_override_mixed_max_tokens: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_tokens is not None and self.max_batch_tokens < 1:
            raise GraphError(
                f"max_batch_tokens of a chunking policy is {self.max_batch_tokens}; "
                "give 1 or more tokens, or None for no budget"
            )


NO_CHUNKING = ChunkingPolicy(max_batch_tokens=None, chunkable=False)
"""The policy of every (node, walk) that a model says nothing about: whole inputs, no budget."""

ChunkingPolicies = Mapping[tuple[str, str], ChunkingPolicy]
"""(node, walk or combined walk) -> policy."""
