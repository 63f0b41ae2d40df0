"""What a decider tells the gateway that owns the requests: tokens of a step, ends, reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shm.codec import Table
from shm.errors import ColumnMismatch

if TYPE_CHECKING:
    from typing_extensions import Buffer

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

TOP = 20
"""Alternatives a row with logprobs carries."""

_PLAIN, _SCORED, _EVENT = 1, 2, 3
_PLAIN_TAG = _PLAIN.to_bytes(8, "little")
_EVENT_TAG = _EVENT.to_bytes(8, "little")

_COLUMNS = {"request": "int64", "attempt": "int32", "index": "int32", "token": "int32", "finish": "int8"}
_INT64, _INT32, _INT8 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int8)
_plain = Table("tokens", _COLUMNS)
_scored = Table("tokens-scored", {**_COLUMNS, "logprob": "float32"})
_tops = Table("tops", {"top_ids": "int32", "top_logprobs": "float32"})


class TokenBatch(NamedTuple):
    """The tokens one step gave to one gateway, a row each, all columns of one length n.

    ``index`` is the token's place among the sequence's generated tokens, from 0; an owner accepts
    a row only if ``attempt`` and ``index`` are the ones it expects. ``finish`` is RUNNING, STOP
    (this token is a stop id), LENGTH or ERROR. The logprob columns are None unless a row of the
    step asked for them; a row that did not ask carries NaN.
    """

    request: NDArray[np.int64]
    attempt: NDArray[np.int32]
    index: NDArray[np.int32]  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
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
    pages_cached: int = 0
    evicted: int = 0
    cached_tokens: int = 0
    page_refusals: int = 0
    squeezed_steps: int = 0


Event = RowFailed | RankReport
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class _Frame(NamedTuple):
    """What stands before each column of a plain record of so many rows, and the bytes of all of it."""

    heads: tuple[bytes, ...]
    end: bytes
    nbytes: int


_frames: dict[int, _Frame] = {}
"""One for each number of rows that occurred: at most the slots of the largest decider."""


def encode_tokens(batch: TokenBatch) -> list[Buffer]:
    """The parts of a token record, for RingWriter.send_parts. Raises ColumnMismatch.

    A record is a u64 (kind, and above it the bytes of the first frame) and a frame of rows; with
    logprobs a second frame follows, of TOP rows for each row of the first. A plain record is one part.
    """
    request, attempt, index, token, finish, logprob, top_ids, top_logprobs = batch
    if logprob is None or top_ids is None or top_logprobs is None:
        frame = _frames.get(request.size)
        if (
            frame is not None
            and request.dtype is _INT64
            and attempt.dtype is _INT32
            and index.dtype is _INT32
            and token.dtype is _INT32
            and finish.dtype is _INT8
        ):
            a, b, c, d, e = frame.heads
            parts: tuple[Any, ...] = (a, request, b, attempt, c, index, d, token, e, finish, frame.end)
            record = b"".join(parts)
            if len(record) == frame.nbytes:
                return [record]
        return [_learn(batch)]
    columns = _columns(batch)
    whole = _scored.encode({**columns, "logprob": logprob})
    tops = {"top_ids": top_ids.reshape(-1), "top_logprobs": top_logprobs.reshape(-1)}
    return [(_SCORED | len(whole) << 32).to_bytes(8, "little"), whole, *_tops.parts(tops)]


def _learn(batch: TokenBatch) -> bytes:
    """Encode a plain record column by column, and keep what its table puts around the columns."""
    columns = _columns(batch)
    parts = [_PLAIN_TAG, *_plain.parts(columns)]
    record = b"".join(parts)
    heads: list[bytes] = []
    end = b""
    for part in parts:
        if isinstance(part, np.ndarray):
            heads.append(end)
            end = b""
        else:
            end += bytes(part)
    _frames[batch.request.size] = _Frame(tuple(heads), end, len(record))
    return record


def _columns(batch: TokenBatch) -> dict[str, NDArray[Any]]:
    return {
        "request": batch.request,
        "attempt": batch.attempt,
        "index": batch.index,
        "token": batch.token,
        "finish": batch.finish,
    }


def encode_event(event: Event) -> bytes:
    """Encode ``event`` for a token ring."""
    return _EVENT_TAG + _encoder.encode(event)


def decode_tokens(record: memoryview) -> TokenBatch | Event:
    """Decode one record of a token ring. The columns of a TokenBatch are views of ``record``.

    Raises ColumnMismatch or msgspec.DecodeError on a malformed record.
    """
    tag = int.from_bytes(record[:8], "little")
    kind = tag & 0xFFFFFFFF
    if kind == _EVENT:
        return _decoder.decode(record[8:])
    if kind == _PLAIN:
        return TokenBatch(**_plain.decode(record[8:]))
    end = 8 + (tag >> 32)
    columns = _scored.decode(record[8:end])
    tops = _tops.decode(record[end:])
    rows = columns["request"].size
    if tops["top_ids"].size != rows * TOP:
        raise ColumnMismatch(
            f"{tops['top_ids'].size} alternatives came with {rows} rows, expected {TOP} a row"
        )
    return TokenBatch(
        **columns,
        top_ids=tops["top_ids"].reshape(rows, TOP),
        top_logprobs=tops["top_logprobs"].reshape(rows, TOP),
    )
