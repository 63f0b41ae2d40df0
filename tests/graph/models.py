"""Graphs that several tests use."""

from __future__ import annotations

from mstar.graph.model import ModelGraph
from mstar.graph.nodes import (
    CLIENT,
    NEXT_WALK,
    Counts,
    GraphEdge,
    GraphNode,
    Loop,
    Parallel,
    Section,
    Sequential,
    StreamingGraphEdge,
)
from mstar.graph.policy import ChunkingPolicies, ChunkingPolicy
from mstar.graph.schedule import Transition, WalkOrder


def one_walk(section: Section, *inputs: str, policies: ChunkingPolicies | None = None) -> ModelGraph:
    """A model of the one walk "run", whose ``inputs`` come with the request."""
    order = WalkOrder(first=("run",), ends=frozenset(("run",)), inputs={"run": inputs})
    return ModelGraph({"run": section}, {"main": order}, chunking_policies=policies or {})


def encoder_decoder() -> ModelGraph:
    """Two encoders side by side, joined by a decoder that runs a Loop of denoising steps, then a codec."""
    audio = GraphNode("audio", ("wave",), (GraphEdge("audio_states", "denoise"),))
    text = GraphNode("text", ("prompt",), (GraphEdge("text_states", "denoise"),))
    step = GraphNode("denoise", ("audio_states", "text_states", "latent"), (GraphEdge("latent", "denoise"),))
    loop = Loop("steps", step, cap="denoising_steps", outputs=(GraphEdge("latent", "codec"),))
    codec = GraphNode("codec", ("latent",), (GraphEdge("media", CLIENT),))
    return one_walk(Sequential((Parallel((audio, text)), loop, codec)), "wave", "prompt", "latent")


def nested_loops() -> ModelGraph:
    """An outer Loop of frames; each plans, runs an inner Loop of codes, and mixes; then all is rendered."""
    plan = GraphNode("plan", ("scene", "state"), (GraphEdge("seed", "code"),))
    code = GraphNode("code", ("seed", "voice"), (GraphEdge("next", "code", "seed"),))
    codes = Loop("codes", code, cap="codes", outputs=(GraphEdge("next", "mix", "codes"),))
    mix = GraphNode("mix", ("codes",), (GraphEdge("frame", CLIENT), GraphEdge("state", "plan")))
    frames = Loop(
        "frames",
        Sequential((plan, codes, mix)),
        cap="frames",
        outputs=(GraphEdge("state", "render", source="mix"),),
    )
    render = GraphNode("render", ("state",), (GraphEdge("video", CLIENT),))
    return one_walk(Sequential((frames, render)), "scene", "state", "voice")


def any_to_any() -> ModelGraph:
    """Encoders in parallel, a thinker that prefills in chunks, a talker fed by its stream, and a codec.

    The thinker's states leave with every chunk, its token with the final one only.
    """
    image = GraphNode("image_encoder", ("pixels",), (GraphEdge("image", "thinker"),))
    audio = GraphNode("audio_encoder", ("wave",), (GraphEdge("audio", "thinker"),))
    token = (GraphEdge("token", CLIENT), GraphEdge("token", NEXT_WALK))
    states = StreamingGraphEdge("states", "talker", walk="talker_prefill")
    thinker = GraphNode("thinker", ("prompt", "image", "audio"), (*token, states))
    think = GraphNode(
        "thinker",
        ("token",),
        (
            GraphEdge("token", CLIENT),
            GraphEdge("token", "thinker"),
            StreamingGraphEdge("states", "talker", walk="talker_decode"),
        ),
    )
    talker = GraphNode("talker", ("states",))
    talk = GraphNode(
        "talker",
        ("states", "codes"),
        (GraphEdge("codes", "talker"), StreamingGraphEdge("codes", "codec", walk="decode_audio")),
    )
    codec = GraphNode("codec", ("codes",), (GraphEdge("audio", CLIENT),))
    return ModelGraph(
        walks={
            "thinker_prefill": Sequential((Parallel((image, audio)), thinker)),
            "thinker_decode": Loop("think", think, cap="max_tokens", start=1),
            "talker_prefill": talker,
            "talker_decode": Loop("talk", talk, cap="max_frames"),
            "decode_audio": codec,
        },
        partitions={
            "thinker": WalkOrder(
                first=("thinker_prefill",),
                ends=frozenset(("thinker_decode",)),
                transitions=(Transition("thinker_prefill", "thinker_decode", local=True),),
                may_end=frozenset(("thinker_prefill",)),
                inputs={"thinker_prefill": ("prompt", "pixels", "wave")},
            ),
            "talker": WalkOrder(
                first=("talker_prefill",),
                ends=frozenset(("talker_decode",)),
                transitions=(
                    Transition("talker_prefill", "talker_prefill"),
                    Transition("talker_prefill", "talker_decode"),
                ),
                inputs={"talker_decode": ("codes",)},
            ),
            "codec": WalkOrder(
                first=("decode_audio",),
                ends=frozenset(("decode_audio",)),
                transitions=(Transition("decode_audio", "decode_audio"),),
            ),
        },
        combined={"thinker_mixed": ("thinker_prefill", "thinker_decode")},
        chunking_policies={
            ("thinker", "thinker_prefill"): ChunkingPolicy(64, True, frozenset(("states",))),
            ("thinker", "thinker_mixed"): ChunkingPolicy(64, True),
        },
    )


def token_loop() -> ModelGraph:
    """One Loop that counts tokens, declared as such."""
    node = GraphNode("lm", ("prompt",), ())
    return one_walk(
        Loop("tokens", node, cap="length", counts=Counts.TOKENS, outputs=(GraphEdge("out", CLIENT),)),
        "prompt",
    )
