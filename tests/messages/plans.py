"""Golden plans: the steps of every kind of model the record has to carry, built by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

from mstar.engine.slot_table import SlotTable
from mstar.messages.request import Sampling
from mstar.messages.step import (
    CARRY,
    FLAG_LOGPROBS,
    HELD,
    INPUT,
    LATE_LAST,
    LATE_RUN,
    Bind,
    Copy,
    Input,
    Mask,
    StepDraft,
    StepPlan,
    StepTail,
    Take,
)
from shm.slab import SlabHandle
from shm.steps import StepLayout, StepSlot
from shm.steps import _plan as slot_places

__all__ = ["LAYOUT", "SCENARIOS", "Chunk", "Decode", "Encode", "Scenario", "Step", "new_slot", "write"]

LAYOUT = StepLayout(max_rows=16, max_grants=64, tail_bytes=4096, slots=4, readers=0)
PREFILL, DECODE, MIXED = 0, 1, 2


class Decode(NamedTuple):
    """A row of one generated token, read from the carry."""

    slot: int
    request: int
    counter: int
    walk: int = DECODE
    late: int = 0


class Chunk(NamedTuple):
    """A row that runs [start, end) of its held input of ``total`` tokens."""

    slot: int
    request: int
    start: int
    end: int
    total: int
    counter: int = -1
    walk: int = PREFILL
    late: int = 0


class Encode(NamedTuple):
    """A row that runs its whole input at once and samples nothing (an encoder, a denoiser, a codec)."""

    slot: int
    request: int
    walk: int = PREFILL
    samples: int = 0


Row = Decode | Chunk | Encode


class Step(NamedTuple):
    """One plan by its parts."""

    rows: tuple[Row, ...] = ()
    binds: tuple[Bind, ...] = ()
    grants: tuple[tuple[int, int, int], ...] = ()
    drops: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    takes: tuple[Take, ...] = ()
    masks: tuple[Mask, ...] = ()
    node: int = 0
    walk: int = DECODE
    bucket: int = 0
    flags: int = 0


class Scenario(NamedTuple):
    """Steps of one decider in order, and the slot tables (per node) of each rank that executes them."""

    name: str
    steps: tuple[Step, ...]
    ranks: int = 1
    nodes: tuple[tuple[int, ...], ...] = ((64,),)

    def tables(self) -> list[list[SlotTable]]:
        """Fresh tables: one list of nodes per rank."""
        return [[SlotTable(16, pools) for pools in self.nodes] for _ in range(self.ranks)]


def new_slot() -> StepSlot:
    """A step slot in plain memory."""
    return StepSlot(memoryview(bytearray(slot_places(LAYOUT)[1])), 0, LAYOUT)


def write(seq: int, step: Step, slot: StepSlot) -> StepPlan:
    """Write ``step`` as plan ``seq`` into ``slot``."""
    draft = StepDraft(seq, slot)
    chunked = any(isinstance(row, Chunk) for row in step.rows)
    for at, row in enumerate(step.rows):
        draft.request[at] = row.request
        draft.rows[:, at] = _columns(row)
    for at, grant in enumerate(step.grants):
        draft.grants[:, at] = grant
    draft.drops[: len(step.drops)] = step.drops
    draft.n_rows, draft.n_grants, draft.n_drops = len(step.rows), len(step.grants), len(step.drops)
    extra: dict[str, Any] = {}
    if step.binds or step.copies or step.takes or step.masks:
        extra["tail"] = StepTail(step.binds, step.copies, step.takes, step.masks)
    return draft.seal(
        node=step.node, walk=step.walk, bucket=step.bucket, flags=step.flags, chunked=chunked, **extra
    )


def _columns(row: Row) -> tuple[int, ...]:
    if isinstance(row, Decode):
        return (row.slot, row.counter, row.walk, CARRY, 1, row.late, -1, -1, -1, -1)
    if isinstance(row, Encode):
        return (row.slot, 0, row.walk, INPUT, row.samples, 0, -1, -1, -1, -1)
    counter = row.start if row.counter < 0 else row.counter
    first = counter == 0
    stride = row.end if first else row.end - row.start
    final = int(row.end == row.total)
    source = INPUT if first else HELD
    samples = int(final and not row.late)
    return (row.slot, counter, row.walk, source, samples, row.late, row.start, row.end, row.total, stride)


def bind(
    request: int, slot: int, length: int, cap: int = 64, *, accepted: int = 0, edges: int = 1, **extra: Any
) -> Bind:
    """A bind whose inputs lie in the first slab, one block per edge."""
    inputs = tuple(Input(edge, 0, SlabHandle(4 * slot + edge, 4096, 4 * length, 1)) for edge in range(edges))
    return Bind(request, slot, 0, length, accepted, cap, inputs, **extra)


def pages(slot: int, *ids: int, pool: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Grants of ``ids`` to ``slot``."""
    return tuple((slot, pool, page) for page in ids)


def _start(request: int, slot: int, length: int, first_page: int, **extra: Any) -> Step:
    return Step(
        rows=(Chunk(slot, request, 0, length, length),),
        binds=(bind(request, slot, length, **extra),),
        grants=pages(slot, *range(first_page, first_page + -(-length // 16))),
        walk=PREFILL,
    )


_two = (_start(11, 0, 20, 0), _start(12, 1, 30, 10))

SCENARIOS = (
    Scenario("plain decode", (*_two, Step(rows=(Decode(0, 11, 1), Decode(1, 12, 1)), bucket=2))),
    Scenario(
        "mixed chunk and decode",
        (
            _start(11, 0, 20, 0),
            Step(
                rows=(Decode(0, 11, 1), Chunk(1, 12, 0, 512, 1200)),
                binds=(bind(12, 1, 1200),),
                grants=pages(1, *range(100, 132)),
                walk=MIXED,
            ),
            Step(
                rows=(Decode(0, 11, 2), Chunk(1, 12, 512, 1024, 1200)),
                grants=pages(1, *range(132, 164)),
                walk=MIXED,
            ),
            Step(rows=(Decode(0, 11, 3), Chunk(1, 12, 1024, 1200, 1200)), walk=MIXED),
            Step(rows=(Decode(0, 11, 4), Decode(1, 12, 1))),
        ),
        nodes=((128,),),
    ),
    Scenario(
        "abort in flight at depth 2",
        (
            *_two,
            Step(rows=(Decode(0, 11, 1), Decode(1, 12, 1))),
            Step(rows=(Decode(0, 11, 2), Decode(1, 12, 2))),
            Step(rows=(Decode(0, 11, 3),), drops=(12,)),
            Step(drops=(11,)),
        ),
    ),
    Scenario(
        "preemption with a step in flight",
        (
            *_two,
            Step(rows=(Decode(0, 11, 1), Decode(1, 12, 1))),
            Step(rows=(Decode(0, 11, 2),), drops=(12,), grants=pages(0, 40)),
            Step(rows=(Decode(0, 11, 3),)),
            Step(
                rows=(Decode(0, 11, 4), Chunk(1, 12, 0, 32, 32)),
                binds=(bind(12, 1, 32, accepted=2),),
                grants=pages(1, 10, 11),
                walk=MIXED,
            ),
            Step(rows=(Decode(0, 11, 5), Decode(1, 12, 3))),
        ),
    ),
    Scenario(
        "prefix hit",
        (
            _start(11, 0, 64, 0),
            Step(
                rows=(Decode(0, 11, 1), Chunk(1, 12, 48, 80, 96, counter=0)),
                binds=(bind(12, 1, 96),),
                grants=(*pages(0, 4), *pages(1, 0, 1, 2, 20, 21)),
                walk=MIXED,
            ),
            Step(rows=(Decode(0, 11, 2), Chunk(1, 12, 80, 96, 96)), grants=pages(1, 22), walk=MIXED),
        ),
    ),
    Scenario(
        "grammar row",
        (
            Step(
                rows=(Chunk(0, 11, 0, 20, 20, late=LATE_RUN),),
                binds=(bind(11, 0, 20, cap=2, late=True),),
                grants=pages(0, 0, 1),
                walk=PREFILL,
            ),
            _start(12, 1, 30, 10),
            Step(rows=(Decode(0, 11, 0, late=LATE_RUN), Decode(1, 12, 1)), masks=(Mask(0, b"\x05\x00\x80"),)),
            Step(
                rows=(Decode(0, 11, 1, late=LATE_LAST), Decode(1, 12, 2)),
                masks=(Mask(0, b"\x00\x01\x00"),),
            ),
        ),
    ),
    Scenario(
        "n = 3",
        (
            _start(31, 0, 40, 0, sampling=Sampling(seed=5, choice=0)),
            Step(
                rows=(
                    Decode(0, 31, 1),
                    Chunk(1, 32, 32, 40, 40, counter=0),
                    Chunk(2, 33, 32, 40, 40, counter=0),
                ),
                binds=(
                    bind(32, 1, 40, sampling=Sampling(seed=5, choice=1)),
                    bind(33, 2, 40, sampling=Sampling(seed=5, choice=2)),
                ),
                grants=(*pages(1, 0, 1, 5), *pages(2, 0, 1, 6)),
                walk=MIXED,
            ),
            Step(rows=(Decode(0, 31, 2), Decode(1, 32, 1), Decode(2, 33, 1))),
        ),
    ),
    Scenario(
        "logprobs",
        (
            _start(11, 0, 20, 0, sampling=Sampling(logprobs=5, logit_bias=((50, -100.0), (7, 3.5)))),
            Step(rows=(Decode(0, 11, 1),), flags=FLAG_LOGPROBS),
        ),
    ),
    Scenario(
        "Qwen3-Omni on one rank",
        (
            Step(rows=(Encode(0, 71),), binds=(bind(71, 0, 100),), node=0, walk=3),
            Step(
                rows=(Chunk(0, 71, 0, 64, 120),),
                binds=(bind(71, 0, 120, edges=3),),
                grants=pages(0, 0, 1, 2, 3),
                node=1,
                walk=PREFILL,
            ),
            Step(rows=(Chunk(0, 71, 64, 120, 120),), grants=pages(0, 4, 5, 6, 7), node=1, walk=PREFILL),
            Step(
                rows=(Chunk(0, 71, 0, 48, 48, walk=4),),
                binds=(bind(71, 0, 48, cap=4096),),
                grants=pages(0, 0, 1, 2),
                takes=(Take(0, 1, 48),),
                node=2,
                walk=4,
            ),
            Step(rows=(Decode(0, 71, 1),), node=1),
            Step(
                rows=(Decode(0, 71, 1, walk=5),), grants=pages(0, 3), takes=(Take(0, 1, 49),), node=2, walk=5
            ),
            Step(
                rows=(Encode(0, 71, walk=6),),
                binds=(bind(71, 0, 25),),
                takes=(Take(0, 2, 25),),
                node=3,
                walk=6,
            ),
        ),
        nodes=((1,), (64,), (64,), (1,)),
    ),
    Scenario(
        "Qwen3-Omni over three ranks, Thinker TP 2",
        (
            Step(
                rows=(Chunk(0, 71, 0, 64, 120), Chunk(1, 72, 0, 64, 200)),
                binds=(bind(71, 0, 120, edges=3), bind(72, 1, 200, edges=3)),
                grants=(*pages(0, 0, 1, 2, 3), *pages(1, 10, 11, 12, 13)),
                walk=PREFILL,
            ),
            Step(
                rows=(Chunk(0, 71, 64, 120, 120), Chunk(1, 72, 64, 136, 200)),
                grants=(*pages(0, 4, 5, 6, 7), *pages(1, 14, 15, 16, 17, 18)),
                walk=PREFILL,
            ),
            Step(
                rows=(Decode(0, 71, 1), Chunk(1, 72, 136, 200, 200)),
                grants=pages(1, 19, 20, 21, 22),
                walk=MIXED,
            ),
            Step(rows=(Decode(1, 72, 1),), drops=(71,)),
        ),
        ranks=2,
    ),
    Scenario(
        "CFG branches on two ranks",
        (
            Step(
                rows=(Encode(0, 81, walk=7), Encode(1, 82, walk=7)),
                binds=(bind(81, 0, 256, edges=2), bind(82, 1, 256, edges=2)),
                walk=7,
            ),
            Step(drops=(81, 82)),
        ),
        ranks=2,
        nodes=((1,),),
    ),
    Scenario(
        "cross KV",
        (
            Step(
                rows=(Chunk(0, 91, 0, 4, 4),),
                binds=(bind(91, 0, 4, cap=448, edges=2),),
                grants=(*pages(0, 0), *pages(0, *range(40, 46), pool=1)),
                walk=PREFILL,
            ),
            Step(rows=(Decode(0, 91, 1),)),
        ),
        nodes=((32, 94),),
    ),
    Scenario(
        "recurrent snapshots",
        (
            Step(
                rows=(Chunk(0, 51, 0, 1024, 1500),),
                binds=(bind(51, 0, 1500),),
                grants=(*pages(0, *range(8)), (0, 1, 3)),
                copies=(Copy(1, 3, 9, True),),
                walk=PREFILL,
            ),
            Step(
                rows=(Chunk(0, 51, 1024, 1500, 1500), Chunk(1, 52, 1024, 1400, 1400, counter=0)),
                binds=(bind(52, 1, 1400),),
                grants=(*pages(0, 8, 9, 10), *pages(1, *range(8), 20, 21), (1, 1, 4)),
                copies=(Copy(1, 9, 4, False), Copy(1, 3, 10, True)),
                walk=PREFILL,
            ),
        ),
        nodes=((128, 1),),
    ),
    Scenario("two replicas, the first", (_start(11, 0, 20, 0), Step(rows=(Decode(0, 11, 1),)))),
    Scenario("two replicas, the second", (_start(12, 0, 30, 0), Step(rows=(Decode(0, 12, 1),)))),
)
