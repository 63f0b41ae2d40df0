"""The gaps that a target ITL leaves and the prefill throughput it keeps, against fixed budgets.

The budget and the fair split that a decider uses, over a virtual device whose steps take what a formula
says, with noise: some rows decode, then long prompts come at once. Nothing is measured but by the virtual
clock, so the figures don't depend on the machine. "kept" is prefill throughput from the burst to its last
token, relative to whole prompts in a step; a gap is a step that somebody decoded in while prompts waited.

    python -m tools.bench.target_itl [--costs h200-8b,h200-small,cpu] [--noise 0.02] [--depth 1] [--seed 0]

Costs: `h200-8b` is fitted to published steps of an 8B model on one H200 (5.6 ms with 16 decodes; 19 ms with
a budget of 512; 64 to 84 ms with 2048), `h200-small` and `cpu` have the same shape with other figures.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mstar.worker.batch import split_fairly
from mstar.worker.budget import StepBudget, StepWork

FLOOR = 64

_ROW = "{:>16} | {:>7} {:>7} {:>7} {:>7} {:>5} | {:>8} {:>6} | {:>6}"


class Costs(NamedTuple):
    """What a step takes: ``fixed_us`` + max(``weights_us``, ``token_us`` * tokens) + its attention.

    ``decode_context_ns`` for each cached token that a decode row reads, ``chunk_context_ns`` for each pair
    of a chunk's token and a token that it sees (the causal half of its own chunk).
    """

    fixed_us: float
    weights_us: float
    token_us: float
    decode_context_ns: float
    chunk_context_ns: float

    def ns(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
        """``decodes`` are tokens cached after the step, ``chunks`` pairs of a start and a length."""
        tokens = len(decodes) + sum(length for _, length in chunks)
        pairs = sum(length * (start + length / 2) for start, length in chunks)
        matrices = max(self.weights_us, self.token_us * tokens)
        attention = self.decode_context_ns * sum(decodes) + self.chunk_context_ns * pairs
        return 1e3 * (self.fixed_us + matrices) + attention


class Noise(NamedTuple):
    """``spread`` is a step's standard deviation, relative; one of ``every`` takes ``pause_ns`` more."""

    spread: float = 0.0
    every: int = 0
    pause_ns: float = 0.0


class Load(NamedTuple):
    """``decodes`` rows with ``context`` tokens each decode; after ``quiet`` steps ``prompts`` come at once.

    A prompt's row generates ``out`` tokens after it.
    """

    decodes: int
    context: int
    prompts: Sequence[int]
    out: int = 16
    quiet: int = 32


class Step(NamedTuple):
    """A step from the burst on: its rows and tokens, what it took, and whether a pause fell into it."""

    decodes: int
    chunk_tokens: int
    context: int
    took_ns: float
    paused: bool


Policy = Callable[[StepWork], int]

_CALM = Noise()
BUSY = Load(16, 640, (16384,) * 8)

COSTS: dict[str, tuple[Costs, Sequence[int]]] = {
    "h200-8b": (Costs(2700, 2500, 27.0, 37, 0.65), (15, 20, 30, 50, 100)),
    "h200-small": (Costs(600, 700, 5.0, 6, 0.12), (5, 10, 20)),
    "cpu": (Costs(2000, 18000, 1100, 900, 12), (100, 200, 400, 1000)),
}
"""Name to costs and the targets to try, in milliseconds."""


def drive(
    costs: Costs,
    load: Load,
    policy: Policy | StepBudget,
    *,
    noise: Noise = _CALM,
    depth: int = 1,
    seed: int = 0,
    floor: int = FLOOR,
) -> list[Step]:
    """The steps from the burst on, till no prompt waits; a step is observed ``depth`` plans after its own."""
    chance = random.Random(seed)
    decodes = [(load.context, 1 << 30)] * load.decodes
    waiting: list[list[int]] = []
    unseen: deque[tuple[StepWork, int, StepWork]] = deque()
    budget = policy if isinstance(policy, StepBudget) else None
    size = policy.tokens if isinstance(policy, StepBudget) else policy
    steps: list[Step] = []
    count = 0
    while count < load.quiet or waiting:
        if count == load.quiet - 1:
            waiting = [[0, total] for total in load.prompts]
        cached = [tokens + 1 for tokens, _ in decodes]
        chunks: list[tuple[int, int]] = []
        rows = len(cached)
        riding = StepWork(rows, rows, sum(cached))
        if waiting:
            room = size(riding) - rows
            shares = split_fairly([total - start for start, total in waiting], room, floor)
            for row, share in zip(waiting, shares, strict=True):
                if share:
                    chunks.append((row[0], share))
                    row[0] += share
        if waiting and not chunks:
            raise ValueError(
                f"prompts wait forever: a budget leaves {room} tokens to them, the floor is {floor}"
            )
        took = costs.ns(cached, chunks) * max(chance.gauss(1.0, noise.spread), 0.1)
        paused = noise.every > 0 and chance.randrange(noise.every) == 0
        took += noise.pause_ns if paused else 0.0
        tokens = sum(length for _, length in chunks)
        context = sum(length * (start + length) for start, length in chunks)
        work = StepWork(rows + tokens, rows + len(chunks), riding.context + context)
        if waiting:
            steps.append(Step(rows, tokens, work.context, took, paused))
        unseen.append((work, int(took), riding))
        if len(unseen) > depth:
            seen = unseen.popleft()
            if budget is not None:
                budget.observe(*seen)
        decodes = [(tokens + 1, left - 1) for tokens, left in decodes if left > 1]
        decodes += [(start, load.out) for start, total in waiting if start == total]
        waiting = [row for row in waiting if row[0] < row[1]]
        count += 1
    return steps


def throughput(steps: Sequence[Step]) -> float:
    """Prefilled tokens a second."""
    return 1e9 * sum(step.chunk_tokens for step in steps) / sum(step.took_ns for step in steps)


def gaps_ms(steps: Sequence[Step]) -> list[float]:
    """What steps with decodes took, in order of size."""
    return sorted(step.took_ns / 1e6 for step in steps if step.decodes)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` of ``ordered`` are at or below."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _line(name: str, steps: Sequence[Step], whole: float, target: int | None) -> str:
    gaps = gaps_ms(steps)
    over = "" if target is None else f"{sum(gap > target for gap in gaps) / len(gaps):.1%}"
    rate = throughput(steps)
    tokens = sum(step.chunk_tokens + step.decodes for step in steps) / len(steps)
    figures = [f"{value:.1f}" for value in (*(quantile(gaps, share) for share in (0.5, 0.9, 0.99)), gaps[-1])]
    return _ROW.format(name, *figures, over, f"{rate:.0f}", f"{rate / whole:.1%}", f"{tokens:.0f}")


def main(argv: list[str] | None = None) -> int:
    """Print a row for each fixed budget and each target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--costs", default=",".join(COSTS), help="of %(default)s")
    parser.add_argument("--noise", type=float, default=0.02, help="relative spread of a step's time")
    parser.add_argument("--pauses", type=int, default=0, help="every so many steps one takes 100 ms more")
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--decodes", type=int, default=BUSY.decodes)
    parser.add_argument("--prompts", type=int, default=len(BUSY.prompts))
    parser.add_argument("--length", type=int, default=BUSY.prompts[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    noise = Noise(options.noise, options.pauses, 1e8)
    load = Load(options.decodes, BUSY.context, (options.length,) * options.prompts)
    most = options.length * options.prompts + options.decodes + options.prompts
    for name in options.costs.split(","):
        costs, targets = COSTS[name]

        def run(policy: Policy | StepBudget, costs: Costs = costs) -> list[Step]:
            return drive(costs, load, policy, noise=noise, depth=options.depth, seed=options.seed)

        whole_steps = run(lambda _: most)
        whole = throughput(whole_steps)
        print(f"\n{name}: {options.decodes} rows decode, {options.prompts} prompts of {options.length} come")
        print(_ROW.format("", "gap p50", "p90", "p99", "max ms", "over", "tokens/s", "kept", "a step"))
        print(_line("whole prompts", whole_steps, whole, None))
        for fixed in (8192, 2048, 512, 128):
            print(_line(f"budget {fixed}", run(lambda _, fixed=fixed: fixed), whole, None))  # type: ignore[misc]
        for target in targets:
            budget = StepBudget(most, FLOOR, target * 1_000_000)
            print(_line(f"target {target} ms", run(budget), whole, target), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
