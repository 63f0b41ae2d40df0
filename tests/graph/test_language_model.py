"""The graph of a causal language model: what every decider of one runs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mstar.graph.compile import compile_graph
from mstar.graph.errors import GraphError
from mstar.graph.program import NONE, Program
from mstar.graph.runtime import END_PARTITION, PENDING, Ended, GraphRuntime
from mstar.model.graphs import COMBINED, LLM, MAX_TOKENS, PREFILL, PROMPT_TOKENS, Walks, language_model
from tests.graph.models import encoder_decoder

PROGRAM = compile_graph(language_model())
IDS = Walks.of(PROGRAM)


def admitted(prompt: int, max_tokens: int, program: Program = PROGRAM) -> GraphRuntime:
    """A runtime whose slot 0 is in prefill, its node in flight."""
    runtime = GraphRuntime(program, 2)
    runtime.set_loop_caps(0, program.caps_of({PROMPT_TOKENS: prompt, MAX_TOKENS: max_tokens}))
    assert runtime.admit(0, IDS.prefill) == (IDS.node,)
    runtime.start(0, IDS.node)
    return runtime


def edges(program: Program, ids: tuple[int, ...]) -> list[str]:
    return [program.edge_names[edge] for edge in ids]


@pytest.mark.behaviour("S4-09")
def test_graph_and_policies_stand_before_anything_is_loaded() -> None:
    code = (
        "import sys; from mstar.graph.compile import compile_graph; from mstar.model.graphs import *;"
        "graph = language_model(); compile_graph(graph);"
        "assert graph.policy('llm', 'prefill').chunkable;"
        "print(sorted({'torch', 'mstar.engine', 'mstar.worker'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_ids_of_its_parts() -> None:
    assert Walks(node=0, prefill=0, decode=1, combined=2, prompt_loop=0, decode_loop=1) == IDS


def test_another_kind_of_model_has_no_such_ids() -> None:
    with pytest.raises(GraphError, match="there is no node 'llm'"):
        Walks.of(compile_graph(encoder_decoder()))


def test_prefill_and_the_combined_walk_have_the_budget_and_decode_has_none() -> None:
    graph = language_model(512)
    assert graph.policy(LLM, PREFILL).max_batch_tokens == 512
    assert graph.policy(LLM, COMBINED).max_batch_tokens == 512
    assert graph.policy(LLM, "decode").max_batch_tokens is None
    assert not graph.policy(LLM, "decode").chunkable
    assert graph.combined_walk_of(LLM, "decode") == COMBINED


def test_a_request_runs_its_chunks_then_its_tokens() -> None:
    runtime = admitted(prompt=10, max_tokens=3)
    first = runtime.complete(0, IDS.node, stride=4)
    assert first.edges == ()
    assert first.ready == (IDS.node,)
    runtime.start(0, IDS.node)
    last = runtime.complete(0, IDS.node, stride=6)
    assert edges(PROGRAM, last.edges) == ["prefill: llm.token -> @client", "prefill: llm.token -> @next"]
    assert last.walk == IDS.decode
    assert last.ready == (IDS.node,)
    runtime.start(0, IDS.node)
    second = runtime.complete(0, IDS.node)
    assert edges(PROGRAM, second.edges) == ["decode: llm.token -> @client", "decode: llm.token -> llm.token"]
    runtime.start(0, IDS.node)
    third = runtime.complete(0, IDS.node)
    assert edges(PROGRAM, third.edges) == ["decode: llm.token -> @client"]
    assert third.ended is Ended.PARTITION


def test_the_same_request_as_columns() -> None:
    runtime = admitted(prompt=10, max_tokens=3)
    row = np.array([0])
    assert not runtime.advance(IDS.prompt_loop, row, np.array([4], np.int32))[0]
    assert runtime.advance(IDS.prompt_loop, row, np.array([6], np.int32))[0]
    assert runtime.finish(0, IDS.prompt_loop).walk == IDS.decode
    runtime.start(0, IDS.node)
    assert not runtime.advance(IDS.decode_loop, row)[0]
    assert runtime.advance(IDS.decode_loop, row)[0]
    assert runtime.finish(0, IDS.decode_loop).ended is Ended.PARTITION


@pytest.mark.behaviour("S3-27")
def test_a_budget_of_one_token_ends_with_the_prefill() -> None:
    routed = admitted(prompt=5, max_tokens=1).complete(0, IDS.node, stride=5)
    assert edges(PROGRAM, routed.edges) == ["prefill: llm.token -> @client"]
    assert routed.ended is Ended.PARTITION
    assert routed.walk == NONE
    assert routed.ready == ()


@pytest.mark.behaviour("S3-27")
def test_a_stop_id_sampled_by_the_prefill_ends_the_partition_and_is_delivered() -> None:
    runtime = admitted(prompt=5, max_tokens=9)
    routed = runtime.complete(0, IDS.node, stride=5, stop=END_PARTITION)
    assert edges(PROGRAM, routed.edges) == ["prefill: llm.token -> @client"]
    assert routed.ended is Ended.PARTITION
    assert runtime.counter[IDS.decode_loop, 0] == PENDING


@pytest.mark.behaviour("S3-34", "S3-36")
@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 4, 16])
def test_a_budget_of_n_tokens_gives_n_whether_or_not_the_prefill_samples(samples: bool, budget: int) -> None:
    program = compile_graph(language_model(samples_at_prefill=samples))
    runtime = admitted(3, budget, program)
    routed = runtime.complete(0, IDS.node, stride=3)
    tokens = sum(name.endswith("@client") for name in edges(program, routed.edges))
    while routed.ended is Ended.NOTHING:
        runtime.start(0, IDS.node)
        routed = runtime.complete(0, IDS.node)
        tokens += sum(name.endswith("@client") for name in edges(program, routed.edges))
    assert tokens == budget


def test_a_resumed_request_goes_on_behind_its_accepted_tokens() -> None:
    runtime = GraphRuntime(PROGRAM, 1)
    runtime.set_loop_caps(0, {IDS.prompt_loop: 14, IDS.decode_loop: 6}, counted={IDS.decode_loop: 4})
    runtime.admit(0, IDS.prefill)
    runtime.start(0, IDS.node)
    runtime.complete(0, IDS.node, stride=14)
    assert runtime.counter[IDS.decode_loop, 0] == 5
    runtime.start(0, IDS.node)
    assert runtime.complete(0, IDS.node).ended is Ended.PARTITION


def test_a_stop_ends_the_decode_before_its_cap() -> None:
    runtime = admitted(prompt=1, max_tokens=100)
    runtime.complete(0, IDS.node)
    runtime.start(0, IDS.node)
    routed = runtime.complete(0, IDS.node, stop=IDS.decode_loop)
    assert edges(PROGRAM, routed.edges) == ["decode: llm.token -> @client"]
    assert routed.ended is Ended.PARTITION
