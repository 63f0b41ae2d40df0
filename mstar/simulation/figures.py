"""Figures of simulated answers, defined as docs/performance.md defines the measured ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["GAP", "STALL", "Answer", "Figures", "figures_of", "victims_of"]

GAP = 0.050
"""Seconds: a gap between two tokens of a stream over this is one that a reader sees."""

STALL = 1.0


class Answer(msgspec.Struct):
    """One request as its client sees it. Times are seconds of the virtual clock.

    ``events`` are the times of its tokens. ``error`` is empty where the answer came to its end.
    """

    group: str
    prompt_tokens: int
    sent: float = 0.0
    ended: float = math.nan
    events: list[float] = msgspec.field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token; NaN without one."""
        return self.events[0] - self.sent if self.events else math.nan

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Seconds between one token and the next, float64 [tokens - 1]."""
        return np.diff(np.array(self.events, np.float64))


class Figures(msgspec.Struct, frozen=True):
    """Answers of one group. Times in seconds, rates a second; NaN where there is nothing to count.

    ``decode_rate`` is tokens a second of one stream, from its first token to its last, on average.
    ``prefill_rate`` is prompt tokens a second, from the first request sent to the last first token.
    """

    requests: int
    failed: int
    seconds: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    itl_max: float
    gaps: int
    stalls: int
    decode_rate: float
    prefill_rate: float
    requests_per_second: float
    output_tokens_per_second: float


def figures_of(answers: Sequence[Answer]) -> Figures:
    """The figures of ``answers``; failed ones count as failed and in nothing else."""
    good = [answer for answer in answers if not answer.error]
    begun = min((answer.sent for answer in good), default=0.0)
    seconds = max((answer.ended for answer in good), default=0.0) - begun
    gaps = np.concatenate([np.empty(0), *(answer.gaps for answer in good)])
    firsts = [answer.ttft for answer in good if answer.events]
    last_first = max((answer.events[0] for answer in good if answer.events), default=begun)
    rates = [_rate(len(a.events) - 1, a.events[-1] - a.events[0]) for a in good if len(a.events) > 1]
    return Figures(
        requests=len(answers),
        failed=len(answers) - len(good),
        seconds=seconds,
        ttft_p50=_percentile(firsts, 50),
        ttft_p99=_percentile(firsts, 99),
        itl_p50=_percentile(gaps, 50),
        itl_p99=_percentile(gaps, 99),
        itl_max=float(gaps.max()) if gaps.size else math.nan,
        gaps=int(np.count_nonzero(gaps > GAP)),
        stalls=int(np.count_nonzero(gaps > STALL)),
        decode_rate=_mean(rates),
        prefill_rate=_rate(sum(answer.prompt_tokens for answer in good), last_first - begun),
        requests_per_second=_rate(len(good), seconds),
        output_tokens_per_second=_rate(sum(len(answer.events) for answer in good), seconds),
    )


def victims_of(decoding: Sequence[Answer], wave: Sequence[Answer]) -> Figures:
    """The streams that were decoding, from the moment the wave was sent to its last first token.

    ``decode_rate`` is then tokens a second of one such stream in that time. They have no TTFT and no prefill.
    """
    begun = min((answer.sent for answer in wave), default=math.inf)
    ended = max((answer.events[0] for answer in wave if answer.events), default=-math.inf)
    cut, rates = [], []
    for answer in decoding:
        inside = [event for event in answer.events if begun <= event <= ended]
        before = [event for event in answer.events if event < begun][-1:]
        if inside and before:
            rates.append(_rate(len(inside), ended - begun))
            cut.append(Answer(answer.group, 0, begun, ended, before + inside))
    found = figures_of(cut)
    return msgspec.structs.replace(
        found,
        ttft_p50=math.nan,
        ttft_p99=math.nan,
        decode_rate=_mean(rates),
        prefill_rate=math.nan,
        output_tokens_per_second=_rate(sum(len(one.events) - 1 for one in cut), found.seconds),
    )


def _percentile(sample: Sequence[float] | NDArray[np.float64], share: float) -> float:
    values = np.asarray(sample, np.float64)
    return float(np.percentile(values, share)) if values.size else math.nan


def _mean(sample: Iterable[float]) -> float:
    values = [value for value in sample if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.nan
