"""Figures from recorded exchanges: pure functions of their times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from tools.bench.serving.exchange import Exchange

__all__ = ["GAP", "STALL", "Figures", "Spread", "percentile", "spread", "steady_rate", "summarise", "victims"]

GAP = 0.050  # seconds: a raw ITL over this is a gap that a reader sees
STALL = 1.0


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of a sample; NaN everywhere when it is empty."""

    p50: float
    p90: float
    p99: float
    p999: float
    largest: float
    mean: float


class Figures(msgspec.Struct, frozen=True):
    """One group of exchanges. Rates are over ``seconds``, from the first request sent to the last end.

    ``events_per_token`` below 1 means that events carried several tokens and ITL is coarser than it looks.
    ``late`` is how far behind its schedule a request was sent: a client that cannot keep up.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    steady_tokens_per_second: float
    ttft: Spread
    itl: Spread
    latency: Spread
    late: Spread
    gaps: int
    stalls: int
    events_per_token: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at ``share`` of an ascending sample, between neighbours in proportion; NaN when empty."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(sample: Sequence[float]) -> Spread:
    """The percentiles of ``sample``, in its unit."""
    ordered = sorted(sample)
    return Spread(
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        p999=percentile(ordered, 0.999),
        largest=ordered[-1] if ordered else math.nan,
        mean=sum(ordered) / len(ordered) if ordered else math.nan,
    )


def summarise(exchanges: Sequence[Exchange]) -> Figures:
    """The figures of ``exchanges``; failed ones count as failed and in nothing else."""
    good = [exchange for exchange in exchanges if not exchange.error]
    begun = min((exchange.sent for exchange in good), default=0.0)
    seconds = max((exchange.ended for exchange in good), default=0.0) - begun
    gaps = [gap for exchange in good for gap in exchange.gaps]
    output = sum(exchange.output_tokens for exchange in good)
    events = sum(len(exchange.events) for exchange in good)
    return Figures(
        requests=len(exchanges),
        failed=len(exchanges) - len(good),
        errors=dict(Counter(exchange.error for exchange in exchanges if exchange.error)),
        seconds=seconds,
        prompt_tokens=sum(exchange.prompt_tokens for exchange in good),
        output_tokens=output,
        requests_per_second=_rate(len(good), seconds),
        output_tokens_per_second=_rate(output, seconds),
        steady_tokens_per_second=steady_rate(good),
        ttft=spread([exchange.ttft for exchange in good if exchange.ttft is not None]),
        itl=spread([gap for exchange in good for gap in exchange.token_gaps]),
        latency=spread([exchange.ended - exchange.sent for exchange in good]),
        late=spread([exchange.sent - exchange.due for exchange in good]),
        gaps=sum(gap > GAP for gap in gaps),
        stalls=sum(gap > STALL for gap in gaps),
        events_per_token=_rate(events, output),
    )


def steady_rate(exchanges: Sequence[Exchange]) -> float:
    """Output tokens a second from the first token of all to the last request sent.

    That window leaves out the ramp at the start and the tail in which a closed loop is no longer full.
    NaN when it is empty. An exchange's tokens are spread evenly over its events.
    """
    begun = min((exchange.events[0] for exchange in exchanges if exchange.events), default=math.inf)
    ended = max((exchange.sent for exchange in exchanges), default=-math.inf)
    if ended <= begun:
        return math.nan
    tokens = 0.0
    for exchange in exchanges:
        inside = sum(begun < event <= ended for event in exchange.events)
        tokens += inside * exchange.output_tokens / max(len(exchange.events), 1)
    return tokens / (ended - begun)


def victims(decoding: Sequence[Exchange], burst: Sequence[Exchange]) -> Figures:
    """The streams that were decoding, from the moment the burst was sent to its last first token.

    Their ``steady_tokens_per_second`` is then text events a second of one such stream, on average.
    """
    begun = min((exchange.sent for exchange in burst), default=math.inf)
    ended = max((exchange.events[0] for exchange in burst if exchange.events), default=-math.inf)
    cut, rates = [], []
    for exchange in decoding:
        inside = [event for event in exchange.events if begun <= event <= ended]
        before = [event for event in exchange.events if event < begun][-1:]
        if inside and before:
            rates.append(_rate(len(inside), ended - begun))
            cut.append(
                msgspec.structs.replace(
                    exchange,
                    due=begun,
                    sent=begun,
                    events=before + inside,
                    sizes=[],
                    output_tokens=len(inside),
                    ended=ended,
                )
            )
    mean = sum(rates) / len(rates) if rates else math.nan
    # The exchanges were cut out of the middle: they have a TTFT only in name.
    return msgspec.structs.replace(summarise(cut), ttft=spread([]), steady_tokens_per_second=mean)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.nan
