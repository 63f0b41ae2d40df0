"""The chunk Loop: a node that may be chunked in a walk runs there inside a Loop that counts tokens.

One iteration is one chunk: it moves the counter by its tokens, and the Loop ends at its cap, the length of
the whole input. Outputs that the policy names in ``per_chunk_outputs`` stay on the Loop's body and leave
with every chunk; the others become outputs of the Loop and leave with the final chunk only.
"""

from __future__ import annotations

from dataclasses import replace

from mstar.graph.errors import GraphError
from mstar.graph.model import ModelGraph
from mstar.graph.nodes import Counts, GraphNode, Loop, Parallel, Section, Sequential, StreamingGraphEdge
from mstar.graph.policy import ChunkingPolicy

__all__ = ["chunk_cap", "chunk_loop", "with_chunk_loops"]


def chunk_loop(node: str, walk: str) -> str:
    """The name of the chunk Loop around ``node`` in ``walk``."""
    return f"{node}.{walk}.chunks"


def chunk_cap(node: str, walk: str) -> str:
    """The name of that Loop's cap: the tokens of the whole input of ``node`` in ``walk``."""
    return f"{node}.{walk}.tokens"


def with_chunk_loops(graph: ModelGraph) -> ModelGraph:
    """``graph`` with every chunkable (node, walk) in its chunk Loop; the same graph once that is done.

    The policies alone decide: a deployment that chunks nothing runs each Loop in one iteration. A node
    may have chunkable and unchunkable walks. Raises GraphError for per-chunk outputs that a policy
    can't mean.
    """
    for (node, walk), policy in graph.chunking_policies.items():
        _check_outputs(graph, node, walk, policy)
    walks = {name: _rewrite(graph, name, section) for name, section in graph.walks.items()}
    return graph if walks == dict(graph.walks) else replace(graph, walks=walks)


def _rewrite(graph: ModelGraph, walk: str, section: Section) -> Section:
    if isinstance(section, GraphNode):
        policy = graph.policy(section.name, walk)
        return _wrap(section, walk, policy) if policy.chunkable else section
    if isinstance(section, Loop):
        if isinstance(section.body, GraphNode) and section.name == chunk_loop(section.body.name, walk):
            return section
        return replace(section, body=_rewrite(graph, walk, section.body))
    sections = tuple(_rewrite(graph, walk, inner) for inner in section.sections)
    return Parallel(sections) if isinstance(section, Parallel) else Sequential(sections)


def _wrap(node: GraphNode, walk: str, policy: ChunkingPolicy) -> Loop:
    per_chunk = policy.per_chunk_outputs
    stay = tuple(edge for edge in node.outputs if edge.name in per_chunk)
    leave = tuple(replace(edge, source=node.name) for edge in node.outputs if edge.name not in per_chunk)
    body = replace(node, outputs=stay)
    name, cap = chunk_loop(node.name, walk), chunk_cap(node.name, walk)
    return Loop(name, body, cap, outputs=leave, counts=Counts.TOKENS)


def _check_outputs(graph: ModelGraph, node: str, walk: str, policy: ChunkingPolicy) -> None:
    if not policy.per_chunk_outputs:
        return
    what = f"the chunking policy of node {node!r} in walk {walk!r}"
    if walk in graph.combined:
        raise GraphError(
            f"{what} names per-chunk outputs, but {walk!r} is a combined walk; name them in the policy of "
            "the walk that makes them"
        )
    if not policy.chunkable:
        raise GraphError(
            f"{what} names per-chunk outputs, but is not chunkable; make it so, or leave them out"
        )
    layout = graph.layouts[walk]
    place = layout.place_of[node]
    edges = [route.edge for route in layout.routes if route.source == place]
    for name in sorted(policy.per_chunk_outputs):
        kinds = [isinstance(edge, StreamingGraphEdge) for edge in edges if edge.name == name]
        if not kinds or not all(kinds):
            streams = sorted({edge.name for edge in edges if isinstance(edge, StreamingGraphEdge)})
            raise GraphError(
                f"{what} names the per-chunk output {name!r}, which is not a streaming output of the node; "
                f"these are {', '.join(streams) or 'none'}"
            )
