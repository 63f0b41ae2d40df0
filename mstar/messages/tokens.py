"""What a decider tells the gateway that owns the requests: tokens of a step, ends, reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shm.codec import Table

__all__ = [
    "ERROR",
    "LENGTH",
    "RUNNING",
    "STOP",
    "RankReport",
    "RowFailed",
    "TokenBatch",
    "decode_tokens",
    "encode_event",
    "encode_tokens",
]

RUNNING, STOP, LENGTH, ERROR = 0, 1, 2, 3

_PLAIN, _LOGPROBS, _EVENT = 1, 2, 3
TOP = 20

_plain = Table(
    "tokens",
    {"request": "int64", "attempt": "int32", "index": "int32", "token": "int32", "finish": "int8"},
)
_scored = Table(
    "tokens-logprobs",
    {
        "request": "int64",
        "attempt": "int32",
        "index": "int32",
        "token": "int32",
        "finish": "int8",
        "logprob": "float32",
        "top_ids": f"int32[{TOP}]",
        "top_logprobs": f"float32[{TOP}]",
    },
)


class TokenBatch(NamedTuple):
    """The tokens one step gave to one gateway, a row each, all columns of one length n.

    ``index`` is the token's place among the sequence's generated tokens, from 0; an owner accepts
    a row only if ``attempt`` and ``index`` are the ones it expects. ``finish`` is RUNNING, STOP
    (this token is a stop id), LENGTH or ERROR. The logprob columns are None unless a row of the
    step asked for them; a row that did not ask carries NaN.
    """

    request: NDArray[np.int64]
    attempt: NDArray[np.int32]
    index: NDArray[np.int32]
    token: NDArray[np.int32]
    finish: NDArray[np.int8]
    logprob: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None


class RowFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A sequence ended without a further token: refused, out of memory, or a failed step."""

    request: int
    attempt: int
    message: str
    status: int = 500


class RankReport(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """A decider's figures, sent now and then and whenever it goes idle."""

    step: int
    running: int
    waiting: int
    slots: int
    pages_total: int
    pages_free: int
    preempted: int
    refused: int
    finished: int
    generated_tokens: int
    prompt_tokens: int
    stale_results: int
    step_seconds: float
    host_seconds: float


Event = RowFailed | RankReport
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_PLAIN_TAG = _PLAIN.to_bytes(8, "little")
_LOGPROBS_TAG = _LOGPROBS.to_bytes(8, "little")
_EVENT_TAG = _EVENT.to_bytes(8, "little")


def encode_tokens(batch: TokenBatch) -> Sequence[bytes | memoryview]:
    """The parts of a token record, for RingWriter.send_parts. Raises ColumnMismatch."""
    columns = {name: value for name, value in zip(batch._fields, batch, strict=True) if value is not None}
    if batch.logprob is None:
        return [_PLAIN_TAG, *_plain.parts(columns)]
    return [_LOGPROBS_TAG, *_scored.parts(columns)]


def encode_event(event: Event) -> bytes:
    """Encode ``event`` for a token ring."""
    return _EVENT_TAG + _encoder.encode(event)


def decode_tokens(record: memoryview) -> TokenBatch | Event:
    """Decode one record of a token ring. The columns of a TokenBatch are views of ``record``.

    Raises ColumnMismatch or msgspec.DecodeError on a malformed record.
    """
    kind = int.from_bytes(record[:8], "little")
    if kind == _EVENT:
        return _decoder.decode(record[8:])
    table = _scored if kind == _LOGPROBS else _plain
    return TokenBatch(**table.decode(record[8:]))
