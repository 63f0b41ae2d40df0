"""A decider without a model: speaks the real messages over real rings, in the test's own loop.

What it generates is a script: `script(admit, prompt)` gives the tokens of a sequence, which end by budget or
by a stop id as a real rank's would. It can stall, fail rows, fill its ring and die.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.actor import Actor, PeerLost, PeerReady
from actors.errors import AskFailed
from mstar.messages.prefix import block_bytes, read_prompt
from mstar.messages.request import Abort, Admit, control_decoder
from mstar.messages.tokens import (
    LENGTH,
    RUNNING,
    STOP,
    TOP,
    RankReport,
    RowFailed,
    TokenBatch,
    encode_event,
    encode_tokens,
)
from shm.ring import Ring, RingReader, RingWriter
from shm.slab import SlabOwner, SlabPool, SlabUser

Script = Callable[[Admit, NDArray[np.int32]], Iterable[int]]

RANK = "rank/0"


class FakeBell:
    """Tells a callback instead of an eventfd."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self.rings = 0

    def notify(self) -> bool:
        self.rings += 1
        self._notify()
        return True


class FakeSleeper(NamedTuple):
    """Of a context's statistics, what metrics show."""

    lost: int
    safety_polls: int


class FakeStatistics(NamedTuple):
    """A context's statistics."""

    sleeper: FakeSleeper


class FakeContext:
    """What GatewayActor uses of a Context, with one rank behind it."""

    def __init__(
        self,
        config: bytes,
        fds: dict[str, int],
        *,
        admit_bytes: int = 1 << 20,
        prompt_blocks: tuple[tuple[int, int], ...] = ((4096, 4096), (1 << 20, 8)),
    ) -> None:
        self.name = "gateway/0"
        self.config = config
        self.fds = fds
        self.loop = asyncio.get_running_loop()
        self.lines: Any = {RANK: SimpleNamespace(stage_name="loading 3/12", step=0, beat=0)}
        self.stages: list[str] = []
        self.stopping = False
        self.hastened = False
        self.answer: bytes | None = b'{"pid": 1, "actors": [{"name": "rank/0", "state": "running"}]}'
        self.asked: list[str] = []
        self._admit_bytes, self._blocks = admit_bytes, prompt_blocks
        self._stop = asyncio.Event()
        self._drain: Callable[[], bool] | None = None
        self._scheduled = False
        self.inbox: dict[str, RingReader] = {}
        self.outbox: dict[str, RingWriter] = {}
        self.slabs: dict[str, SlabOwner] = {}
        self._segments: list[Any] = []
        self.generation = 0
        self.rank_bell = asyncio.Event()
        self.connect()

    def connect(self) -> None:
        """New rings and slabs, as after the rank's start."""
        self.generation += 1
        admit, tokens = Ring.create(self._admit_bytes), Ring.create(1 << 20)
        pool = SlabPool.create(self._blocks)
        self._segments += [admit.segment, tokens.segment, pool.segment]
        self.outbox["admit/0"] = RingWriter(admit, FakeBell(self.rank_bell.set))  # type: ignore[arg-type]
        self.inbox["tokens/0"] = RingReader(tokens)
        self.slabs["prompts/0"] = SlabOwner(pool)
        self.rank_inbox = RingReader(admit)
        self.rank_outbox = RingWriter(tokens, FakeBell(self.rouse))  # type: ignore[arg-type]
        self.rank_prompts = SlabUser(pool)

    def poison(self) -> None:
        for segment in self._segments:
            segment.poison(1)

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        self.stages.append(name)

    def report(self, kind: str, payload: bytes) -> None:
        pass

    async def ask(self, kind: str, payload: bytes = b"") -> bytes:
        self.asked.append(kind)
        if self.answer is None:
            raise AskFailed("the supervisor did not answer")
        return self.answer

    def serve(self, drain: Callable[[], bool]) -> None:
        self._drain = drain
        self.rouse()

    def rouse(self) -> None:
        if self._drain is not None and not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._drain is not None and self._drain():
            self.rouse()

    async def until_stopping(self) -> None:
        await self._stop.wait()

    def stop(self) -> None:
        self.stopping = True
        self._stop.set()

    def statistics(self) -> Any:
        return FakeStatistics(FakeSleeper(0, 0))

    def close(self) -> None:
        self._drain = None
        self.inbox.clear()
        self.outbox.clear()
        self.slabs.clear()


class Row(NamedTuple):
    """A sequence the fake serves."""

    admit: Admit
    tokens: Iterator[int]
    places: Iterator[int]


class FakeRank:
    """See the module. `run` steps by itself, but only `credit` times where it is a number."""

    def __init__(self, ctx: FakeContext, actor: Actor, script: Script) -> None:
        self.ctx = ctx
        self.actor = actor
        self.script = script
        self.rows: dict[int, Row] = {}
        self.prompts: dict[int, NDArray[np.int32]] = {}
        self.digests: dict[int, bytes] = {}
        self.admitted: list[Admit] = []
        self.aborted: list[int] = []
        self.deaf = False
        self.credit: int | None = None
        self.steps = 0

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self.take()
            if self.credit != 0 and self.step():
                self.credit = None if self.credit is None else self.credit - 1
                await asyncio.sleep(0)
            else:
                self.ctx.rank_bell.clear()
                await self.ctx.rank_bell.wait()

    def grant(self, steps: int | None) -> None:
        """Let it take so many steps more, None for as many as it likes."""
        self.credit = steps
        self.ctx.rank_bell.set()

    def take(self) -> None:
        """Read what the gateway asked for."""
        reader = self.ctx.rank_inbox
        while not self.deaf and (record := reader.peek()) is not None:
            message = control_decoder.decode(record)
            reader.release()
            if isinstance(message, Abort):
                self.aborted.append(message.request)
                self.rows.pop(message.request, None)
                continue
            handle = message.prompt
            block = self.ctx.rank_prompts.view(handle)
            assert handle.nbytes == block_bytes(message.prompt_tokens, message.hashes)
            found, digests = read_prompt(block, message.prompt_tokens, message.hashes)
            prompt = found.copy()
            self.ctx.rank_prompts.give_back(handle)
            for sequence in message.sequences():
                self.admitted.append(sequence)
                self.prompts[sequence.request] = prompt
                self.digests[sequence.request] = digests
                tokens = iter(self.script(sequence, prompt))
                self.rows[sequence.request] = Row(sequence, tokens, itertools.count())

    def step(self) -> bool:
        """Give every row one token; False where there is nothing to do."""
        if not self.rows:
            return False
        ids, indices, tokens, finishes = [], [], [], []
        scored = any(row.admit.sampling.logprobs >= 0 for row in self.rows.values())
        for id, row in list(self.rows.items()):
            token, index = next(row.tokens), next(row.places)
            finish = RUNNING
            if token in row.admit.stop_ids and index + 1 > row.admit.min_tokens:
                finish = STOP
            elif index + 1 >= row.admit.max_tokens:
                finish = LENGTH
            if finish != RUNNING:
                del self.rows[id]
            ids.append(id)
            indices.append(index)
            tokens.append(token)
            finishes.append(finish)
        self.send(batch(ids, indices, tokens, finishes, scored=scored))
        self.steps += 1
        return True

    def send(self, rows: TokenBatch) -> None:
        assert self.ctx.rank_outbox.send_parts(encode_tokens(rows))

    def fail_row(self, id: int, message: str, status: int = 500) -> None:
        """End a sequence as a rank does that gives up on it."""
        self.rows.pop(id, None)
        assert self.ctx.rank_outbox.send(encode_event(RowFailed(id, 0, message, status)))

    def report(self, **figures: Any) -> None:
        values: dict[str, Any] = dict.fromkeys(RankReport.__struct_fields__, 0)
        assert self.ctx.rank_outbox.send(encode_event(RankReport(**{**values, **figures})))

    def die(self, reason: str = "killed by SIGKILL") -> None:
        """What the gateway sees when the rank's process is killed."""
        self.rows.clear()
        self.ctx.poison()
        self.actor.on_peer(PeerLost(RANK, "cell/0", reason))

    def revive(self) -> None:
        """What the gateway sees when the rank's cell serves again."""
        self.ctx.connect()
        self.ctx.rank_bell.set()
        self.actor.on_peer(PeerReady(RANK, "cell/0", self.ctx.generation))


def batch(
    ids: list[int], indices: list[int], tokens: list[int], finishes: list[int], *, scored: bool = False
) -> TokenBatch:
    """Rows of a step; with `scored`, token t has log-probability -0.5 and alternatives t, t+1, ..."""
    plain = TokenBatch(
        np.array(ids, np.int64),
        np.zeros(len(ids), np.int32),
        np.array(indices, np.int32),
        np.array(tokens, np.int32),
        np.array(finishes, np.int8),
    )
    if not scored:
        return plain
    tops = (np.array(tokens, np.int32)[:, None] + np.arange(TOP, dtype=np.int32)).astype(np.int32)
    values = np.tile(-0.5 - np.arange(TOP, dtype=np.float32), (len(ids), 1))
    return plain._replace(logprob=np.full(len(ids), -0.5, np.float32), top_ids=tops, top_logprobs=values)
