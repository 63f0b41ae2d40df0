"""What a step costs: device time from its work, host time from its rows, and the way to the client.

A cost is data, in a JSON file. It is measured (``tools.bench.step_cost`` fits a CostTable to the engine on
this machine) or worked out from what a device can do (Roofline). ``mstar.simulation.presets`` has some.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta

from mstar.config.load import ConfigError

if TYPE_CHECKING:
    from mstar.worker.budget import StepWork

__all__ = [
    "FREE",
    "Cost",
    "CostTable",
    "ModelFacts",
    "Roofline",
    "StepCost",
    "decode_cost",
    "encode_cost",
    "read_cost",
]

Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]


class StepCost(Protocol):
    """What the simulator asks of a cost."""

    def ns(self, work: StepWork, ranks: int) -> int:
        """Device time of a step of ``work`` on ``ranks`` ranks in lockstep, in nanoseconds."""
        ...

    def host_ns(self, work: StepWork, ranks: int) -> int:
        """Time of the leader's thread for that step beside the device's, in nanoseconds."""
        ...


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deployment leaves to the model and the machine.

    ``window`` is the longest sequence in tokens, ``kv_token_bytes`` what a token takes in the KV cache,
    ``cache_bytes`` the device's memory for it where the deployment names none (0: the deployment's
    default), ``batch_tokens`` the budget of a step where the deployment names none.
    """

    name: str
    window: Annotated[int, Meta(ge=1)]
    kv_token_bytes: Annotated[int, Meta(ge=1)]
    cache_bytes: Count = 0
    batch_tokens: Annotated[int, Meta(ge=1)] = 512


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time beside the device, in nanoseconds.

    ``step_ns`` and ``row_ns`` are the leader's per step and row. ``submit_ns`` passes between a client's
    request and the leader's knowing it, ``submit_token_ns`` more for every token of its prompt;
    ``deliver_ns`` between a step's landing and the client's having its tokens. ``inline``: the device is
    the host, as on a CPU, and a step runs where it is launched.
    """

    step_ns: Amount = 0.0
    row_ns: Amount = 0.0
    submit_ns: Amount = 0.0
    submit_token_ns: Amount = 0.0
    deliver_ns: Amount = 0.0
    inline: bool = False

    def ns(self, rows: int) -> int:
        """The leader's time for a step of ``rows`` rows."""
        return round(self.step_ns + self.row_ns * rows)


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What several ranks pay for their collectives in a step: so much a step, and so much a token."""

    step_ns: Amount = 0.0
    token_ns: Amount = 0.0


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="table"):
    """Device time fitted to measured steps; every time in nanoseconds.

    ``tokens`` and ``tokens_ns`` are knots of what the tokens of a step cost, of a whole step's fixed part
    too; between them it is linear, and beyond the last one the last slope goes on. A row costs
    ``row_ns`` more. Attention is priced by pairs of a new token with a cached one: ``read_ns`` in a step of
    decodes alone, else ``own_ns`` for pairs inside what the step brings and ``past_ns`` for the
    others. Ranks divide all of it but the first knot; ``collective`` comes on top.
    """

    model: ModelFacts
    tokens: tuple[Annotated[int, Meta(ge=1)], ...]
    tokens_ns: tuple[Amount, ...]
    row_ns: Amount = 0.0
    read_ns: Amount = 0.0
    past_ns: Amount = 0.0
    own_ns: Amount = 0.0
    host: Host = Host()
    collective: Collective = Collective()
    about: str = ""

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.tokens) != len(self.tokens_ns):
            raise ValueError(
                f"{len(self.tokens)} knots with {len(self.tokens_ns)} times; allowed are two or more of each"
            )
        if any(after <= before for before, after in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError(f"the knots {list(self.tokens)} do not rise")
        if any(after < before for before, after in zip(self.tokens_ns, self.tokens_ns[1:], strict=False)):
            raise ValueError("a step of more tokens costs less than one of fewer")

    def ns(self, work: StepWork, ranks: int) -> int:
        if not work.tokens:
            return 0
        first = self.tokens_ns[0]
        past, own = pairs(work)
        shared = self._of_tokens(work.tokens) - first + work.rows * self.row_ns
        if work.tokens == work.rows:
            shared += work.context * self.read_ns
        else:
            shared += past * self.past_ns + own * self.own_ns
        together = self.collective.step_ns + work.tokens * self.collective.token_ns if ranks > 1 else 0.0
        return round(first + shared / ranks + together)

    def host_ns(self, work: StepWork, ranks: int) -> int:
        return self.host.ns(work.rows)

    def _of_tokens(self, tokens: int) -> float:
        knots, times = self.tokens, self.tokens_ns
        right = min(max(bisect_left(knots, tokens), 1), len(knots) - 1)
        left = right - 1
        slope = (times[right] - times[left]) / (knots[right] - knots[left])
        return max(times[left] + slope * (tokens - knots[left]), 0.0)


class Roofline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="roofline"):
    """Device time from what a device can do.

    A step's matrix multiplications take the longer of reading the weights (``weight_bytes`` at
    ``weight_bytes_per_second``) and computing (``token_flops`` for each token, ``row_flops`` more for the
    logits of each row, at ``flops_per_second``). A decode's attention reads ``kv_token_bytes`` of the
    model's facts per cached token, at ``kv_bytes_per_second``; a chunk's computes ``pair_flops`` for each
    pair of a new token with an earlier one, at ``pair_flops_per_second``. ``fixed_ns`` is what the many
    small kernels of a step take at any size, ``row_ns`` a row's recurrent state. Ranks divide
    bytes and flops; ``collective`` comes on top.
    """

    model: ModelFacts
    weight_bytes: Positive
    weight_bytes_per_second: Positive
    token_flops: Positive
    row_flops: Amount
    flops_per_second: Positive
    kv_bytes_per_second: Positive
    pair_flops: Amount
    pair_flops_per_second: Positive
    fixed_ns: Amount = 0.0
    row_ns: Amount = 0.0
    host: Host = Host()
    collective: Collective = Collective()
    about: str = ""

    def ns(self, work: StepWork, ranks: int) -> int:
        if not work.tokens:
            return 0
        flops = work.tokens * self.token_flops + work.rows * self.row_flops
        seconds = max(self.weight_bytes / self.weight_bytes_per_second, flops / self.flops_per_second)
        if work.tokens == work.rows:
            seconds += work.context * self.model.kv_token_bytes / self.kv_bytes_per_second
        else:
            past, own = pairs(work)
            seconds += (past + own) * self.pair_flops / self.pair_flops_per_second
        shared = seconds * 1e9 + work.rows * self.row_ns
        together = self.collective.step_ns + work.tokens * self.collective.token_ns if ranks > 1 else 0.0
        return round(self.fixed_ns + shared / ranks + together)

    def host_ns(self, work: StepWork, ranks: int) -> int:
        return self.host.ns(work.rows)


class _Free:
    """A cost of nothing: for the simulator's own tests, in which only order matters."""

    def ns(self, work: StepWork, ranks: int) -> int:
        return 0

    def host_ns(self, work: StepWork, ranks: int) -> int:
        return 0


FREE: StepCost = _Free()

Cost = CostTable | Roofline


def pairs(work: StepWork) -> tuple[float, float]:
    """Pairs of a new token with a cached one: (with what was there before, causal ones inside the step).

    A step tells tokens, rows and the sum of query length times key length alone. All its new tokens are
    taken for one chunk and ``rows - 1`` decodes, which is exact for the steps that take long.
    """
    chunk = max(work.tokens - work.rows + 1, 0)
    square = min(float(chunk * chunk), float(work.context))
    return work.context - square, square / 2


def decode_cost(text: bytes, source: str) -> Cost:
    """The cost in the JSON ``text``; raises ConfigError naming ``source`` and what is wrong."""
    try:
        return msgspec.json.decode(text, type=Cost)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source} is no cost: {error}; `python -m tools.bench.step_cost` writes one"
        ) from error


def encode_cost(cost: Cost) -> bytes:
    """``cost`` as indented JSON, which ``decode_cost`` reads back."""
    return msgspec.json.format(msgspec.json.encode(cost), indent=2) + b"\n"


def read_cost(path: Path) -> Cost:
    """The cost in the file ``path``; raises ConfigError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the cost file {path} cannot be read: {error.strerror}") from error
    return decode_cost(text, f"the cost file {path}")
