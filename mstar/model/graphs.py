"""The graphs of model kinds, declared as data: what they run, in which order, and what of it may be chunked.

Nothing is loaded for them: a worker compiles its tables, and an engine reads its policies, from these.
"""

from __future__ import annotations

from typing import NamedTuple

from mstar.graph.compile import compile_graph
from mstar.graph.model import ModelGraph
from mstar.graph.nodes import CLIENT, NEXT_WALK, GraphEdge, GraphNode, Loop
from mstar.graph.policy import ChunkingPolicy
from mstar.graph.program import Program
from mstar.graph.rewrite import chunk_cap, chunk_loop
from mstar.graph.schedule import Transition, WalkOrder

__all__ = [
    "COMBINED",
    "DECODE",
    "DECODE_LOOP",
    "DEFAULT_MAX_BATCH_TOKENS",
    "LANGUAGE_MODEL",
    "LLM",
    "MAX_TOKENS",
    "PREFILL",
    "PROMPT_LOOP",
    "PROMPT_TOKENS",
    "WALKS",
    "Walks",
    "language_model",
]

LLM = "llm"
PREFILL, DECODE, COMBINED = "prefill", "decode", "prefill_decode"
DECODE_LOOP, PROMPT_LOOP = "llm.decode.tokens", chunk_loop(LLM, PREFILL)
MAX_TOKENS, PROMPT_TOKENS = "max_tokens", chunk_cap(LLM, PREFILL)
"""The caps that a request sets: the most tokens it may generate, and the length of its prompt."""

DEFAULT_MAX_BATCH_TOKENS = 512
"""Of a step that prefills: as many as keep a step of a small model on a CPU under half a second."""


def language_model(
    max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS, *, samples_at_prefill: bool = True
) -> ModelGraph:
    """A causal language model: one node, whose prefill runs the prompt and whose decode the rest.

    The decode Loop counts generated tokens up to MAX_TOKENS and carries each into the next iteration. A
    prefill that samples has generated the first of them, so the Loop starts at 1 and has one iteration
    less; of one that does not (``samples_at_prefill`` False) the input of the first decode is made of the
    request, and the Loop starts at 0. That is the only place where the difference is told.
    ``max_batch_tokens`` is the budget of a step that prefills, alone or beside decodes; a budget that a
    deployment gives to prefill itself caps its rows in a step that also decodes.
    """
    first = (GraphEdge("token", CLIENT), GraphEdge("token", NEXT_WALK)) if samples_at_prefill else ()
    prefill = GraphNode(LLM, ("prompt",), first)
    step = GraphNode(LLM, ("token",), (GraphEdge("token", CLIENT), GraphEdge("token", LLM)))
    decode = Loop(DECODE_LOOP, step, cap=MAX_TOKENS, start=int(samples_at_prefill))
    inputs = {PREFILL: ("prompt",)} | ({} if samples_at_prefill else {DECODE: ("token",)})
    order = WalkOrder(
        first=(PREFILL,),
        ends=frozenset((DECODE,)),
        transitions=(Transition(PREFILL, DECODE, local=True),),
        may_end=frozenset((PREFILL,)) if samples_at_prefill else frozenset(),
        inputs=inputs,
    )
    chunked = ChunkingPolicy(max_batch_tokens, chunkable=True, can_override_mixed_max_tokens=True)
    return ModelGraph(
        walks={PREFILL: prefill, DECODE: decode},
        partitions={LLM: order},
        combined={COMBINED: (PREFILL, DECODE)},
        chunking_policies={(LLM, PREFILL): chunked, (LLM, COMBINED): chunked},
    )


class Walks(NamedTuple):
    """Ids of a language model's parts in a compiled graph: its node, walks, the label of a step in which
    both run, and the Loops.
    """

    node: int
    prefill: int
    decode: int
    combined: int
    prompt_loop: int
    decode_loop: int

    @classmethod
    def of(cls, program: Program) -> Walks:
        """Resolve them. Raises GraphError where ``program`` is of another kind of model."""
        return cls(
            node=program.node_id(LLM),
            prefill=program.walk_id(PREFILL),
            decode=program.walk_id(DECODE),
            combined=program.walk_id(COMBINED),
            prompt_loop=program.loop_id(PROMPT_LOOP),
            decode_loop=program.loop_id(DECODE_LOOP),
        )


LANGUAGE_MODEL = compile_graph(language_model())
WALKS = Walks.of(LANGUAGE_MODEL)
"""The one graph of every model that this version serves, compiled, and its ids."""
