"""What a gateway asks of a decider: admit a sequence, or abort it."""

from __future__ import annotations

import msgspec

from shm.slab import SlabHandle

__all__ = ["Abort", "Admit", "Control", "Sampling", "control_decoder", "encode_control"]


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the tokens of one sequence are drawn. Ranges are checked at the gateway.

    ``temperature`` 0 is greedy. ``top_k`` -1 and ``min_p`` 0 are off. Penalties are OpenAI's
    (presence, frequency: over generated tokens) and the usual repetition penalty (1 is off; over
    prompt and generated tokens). ``logprobs`` is -1 for none, else how many alternatives, 0 to 20.
    The uniform of a position is keyed by (``seed``, ``choice``, node, position).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1


class Admit(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """One prompt for a decider, and ``count`` sequences (choices of a request) that continue it.

    ``request`` is ours, unique per sequence for the life of the daemon; further sequences have the
    ids and the choices that follow. ``prompt`` is a block of the gateway's slab holding int32 token
    ids: the prompt and then ``accepted`` tokens that were already delivered before a resume. It is
    given back once, when no sequence needs it any more. After the tokens, at the next multiple of 8
    bytes, lie ``hashes`` digests of its full pages (mstar.messages.prefix), 0 where nothing of it may
    be shared. ``node`` is the decider's node that runs it. ``max_tokens`` counts every generated token,
    the accepted ones included; so does ``min_tokens``, below which ``stop_ids`` are not sampled.
    """

    request: int
    attempt: int
    prompt: SlabHandle
    prompt_tokens: int
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    accepted: int = 0
    count: int = 1
    hashes: int = 0
    node: int = 0

    def sequences(self) -> list[Admit]:
        """The sequences one by one, each with a ``count`` of 1."""
        if self.count == 1:
            return [self]
        first = self.sampling.choice
        return [
            msgspec.structs.replace(
                self,
                request=self.request + i,
                sampling=msgspec.structs.replace(self.sampling, choice=first + i),
                count=1,
            )
            for i in range(self.count)
        ]


class Abort(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """The owner no longer wants this sequence; nothing is answered."""

    request: int


Control = Admit | Abort

_encoder = msgspec.msgpack.Encoder()

control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
"""Decodes a record of an admission ring; raises msgspec.DecodeError on a malformed one."""


def encode_control(message: Control) -> bytes:
    """Encode ``message`` for an admission ring."""
    return _encoder.encode(message)
