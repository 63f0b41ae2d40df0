"""A cell of real processes over a real gloo group and a real step ring, without daemon, gateway or loop.

The test's process tells every rank what to build and the leader what to generate. The followers run
whatever the step ring brings. A set of processes serves many engines, one after another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.config.schema import Deployment, RankConfig
from mstar.engine.slot_table import SlotTable
from mstar.messages.prefix import block_bytes, page_digests, write_prompt
from mstar.messages.request import Admit
from mstar.messages.step import Bind, StepPlan
from mstar.messages.tokens import RowFailed
from mstar.worker.follower import Follower, StepInlet
from mstar.worker.leader import Leader
from mstar.worker.scheduler import MicroScheduler
from shm.slab import SlabOwner, SlabPool, SlabUser
from shm.steps import StepLayout, StepReader, StepRing, StepWriter
from tests.worker.local_rank import Answer, Prompt

__all__ = ["Abort", "Books", "Cell", "CellFailed", "Job", "Ran"]

SALT = b"salt"
PATIENCE = 60.0
BLOCKS = ((16 << 10, 64), (64 << 10, 16))
_NAP = 0.0002
POINTS = ("before plan", "after launch", "after collect")


class Abort(NamedTuple):
    """Abort prompt ``index`` of the job in turn ``turn`` of the leader's loop, at one of POINTS in it."""

    index: int
    turn: int
    point: str = POINTS[0]


class Job(NamedTuple):
    """Prompts to generate; ``stagger`` admits one every so many turns instead of all at once."""

    prompts: Sequence[Prompt]
    stagger: int = 0
    aborts: Sequence[Abort] = ()


class Books(NamedTuple):
    """What one rank holds, and what it ran: ``log`` has an entry for each step, equal on every rank.

    An entry is (seq, walk, requests, counters, chunk starts, chunk ends, digest of the page table).
    """

    bound: int
    pages: int
    prepared: int
    held_inputs: int
    log: list[tuple[Any, ...]]


class Ran(NamedTuple):
    """What came of a job: answers by prompt, turns of the leader, the books of every rank and its ledger."""

    answers: list[Answer]
    turns: int
    books: list[Books]
    ledger: dict[str, int]


class CellFailed(Exception):
    """Ranks failed; ``errors`` is what each raised, by rank, as "Type: message"."""

    def __init__(self, errors: Mapping[int, str]) -> None:
        super().__init__(str(dict(errors)))
        self.errors = dict(errors)


class Cell:
    """``world`` processes. ``plant(rank, inlet)`` gives what a follower reads through; a leader has None."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mstar.worker.engine", "tests.worker.tp_cell"])
        self.world = world
        self._generation = 0
        self._meeting = os.memfd_create("rendezvous")
        self._ends: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world, reduction.DupFd(self._meeting)), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def build(
        self, directory: Path, *, plant: Callable[..., StepInlet] | None = None, **settings: object
    ) -> None:
        """A new engine on every rank. Raises CellFailed."""
        self.build_each(directory, [settings] * self.world, plant=plant)

    def build_each(
        self,
        directory: Path,
        settings: Sequence[Mapping[str, object]],
        *,
        plant: Callable[..., StepInlet] | None = None,
    ) -> None:
        """As ``build``, with settings of its own for each rank."""
        self._generation += 1
        slots = int(settings[0].get("max_num_seqs", 8))  # type: ignore[call-overload]
        layout = StepLayout(slots, 4096, 64 << 10, 8, self.world - 1)
        ring, pool = StepRing.create(layout), SlabPool.create(BLOCKS)
        for end, process, own in zip(self._ends, self.processes, settings, strict=True):
            end.send(("build", str(directory), dict(own), self._generation, tuple(layout), plant))
            for memory in (ring.segment, pool.segment):
                reduction.send_handle(end, memory.fd, process.pid)
        ring.close()
        pool.close()
        self._hear()

    def run(self, job: Job) -> Ran:
        """Generate, and return when every rank has run every step. Raises CellFailed."""
        for end in self._ends:
            end.send(("run", job))
        leader, *followers = self._ends
        leader.poll(PATIENCE)
        for end in followers:
            with contextlib.suppress(OSError):
                end.send(("done",))
        told = self._hear()
        answers, turns, ledger = told[0][0]
        return Ran(answers, turns, [books for _, books in told], ledger)

    def _hear(self) -> list[Any]:
        """One answer of every rank."""
        found: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + PATIENCE
        for rank, end in enumerate(self._ends):
            if not end.poll(max(0.0, deadline - time.monotonic())):
                errors[rank] = f"no answer within {PATIENCE:g} s"
                continue
            try:
                kind, found[rank] = end.recv()
            except (EOFError, ConnectionError):
                kind, found[rank] = "failed", "gone"
            if kind == "failed":
                errors[rank] = found[rank]
        if errors:
            raise CellFailed(errors)
        return [found[rank] for rank in range(self.world)]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        os.close(self._meeting)

    def __enter__(self) -> Cell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- in the processes of the ranks ---------------------------------------------------------------


class _Quiet:
    """Stands in for the bell of a reader that never sleeps."""

    rings = 0

    def rouse(self) -> bool:
        return False


class _Rank:
    def __init__(self, rank: int, world: int, meeting: str, build: tuple[Any, ...], fds: list[int]) -> None:
        from mstar.worker.engine import build_engine

        _, directory, settings, generation, layout, plant = build
        deployment = Deployment(model="local", **{"dtype": "float32", "threads": 1, **settings})
        config = RankConfig(
            rank, deployment, "local", directory, world, SALT, digest="handed out", group=meeting
        )
        self.ring = StepRing.attach(fds[0], StepLayout(*layout))
        self.pool = SlabPool.attach(fds[1])
        self.slab: SlabOwner | SlabUser = SlabOwner(self.pool) if rank == 0 else SlabUser(self.pool)
        self.engine = build_engine(config, self._input, lambda *stage: None, generation=generation)
        self.log: list[tuple[Any, ...]] = []
        executor = self.engine.executor
        launch, (table,) = executor.launch, executor.tables
        self.table: SlotTable = table

        def logged(plan: StepPlan) -> None:
            columns = (plan.request, plan.counter, plan.chunk_starts, plan.chunk_ends)
            entry = (plan.seq, plan.walk, *(tuple(column.tolist()) for column in columns))
            launch(plan)
            self.log.append((*entry, zlib.crc32(table.tables[0].tobytes())))

        executor.launch = logged  # type: ignore[method-assign]
        if rank == 0:
            if plant is not None:
                plant(rank, None)
            bells: Any = [_Quiet() for _ in range(world - 1)]
            steps = StepWriter(self.ring, bells)
            limits = self.engine.limits
            self.scheduler = MicroScheduler(limits, steps.begin, self.slab, salt=SALT)  # type: ignore[arg-type]
            self.leader = Leader(self.scheduler, executor, steps, world - 1, self.ring.layout.slots)
            self.steps = steps
        else:
            reader: StepInlet = StepReader(self.ring, rank - 1)
            self.reader = reader
            self.follower = Follower(executor, reader if plant is None else plant(rank, reader))
        self.request = 0

    def _input(self, bind: Bind) -> NDArray[np.int32]:
        return np.frombuffer(self.slab.view(bind.inputs[0].handle), np.int32, bind.length)

    def books(self) -> Books:
        runner = self.engine.runner.statistics()
        table = self.table.statistics()
        log, self.log = self.log, []
        return Books(table.bound, table.pages[0], runner.prepared, runner.held, log)

    # ---- leading -----------------------------------------------------------------------------

    def admit(self, prompt: Prompt) -> int:
        self.request += 1
        tokens = np.array(prompt.tokens, np.int32)
        limits = self.engine.limits
        digests = page_digests(tokens, limits.page_size, SALT) if limits.prefix_cache else b""
        hashes = len(digests) // 16
        owner = self.slab
        assert isinstance(owner, SlabOwner)
        handle = owner.lease(block_bytes(tokens.size, hashes))
        write_prompt(owner.view(handle), tokens, digests)
        message = Admit(
            self.request,
            0,
            handle,
            tokens.size,
            prompt.max_tokens,
            prompt.sampling,
            prompt.stop_ids,
            prompt.min_tokens,
            hashes=hashes,
        )
        self.scheduler.admit(message, tokens, digests, lambda: owner.release(handle))
        return self.request

    def generate(self, job: Job) -> tuple[list[Answer], int, dict[str, int]]:
        scheduler, leader, steps = self.scheduler, self.leader, self.steps
        answers: dict[int, Answer] = {}
        numbers: list[int] = []
        waiting = list(job.prompts)
        turn = 0

        def abort(point: str) -> None:
            for found in job.aborts:
                if (found.turn, found.point) == (turn, point) and found.index < len(numbers):
                    scheduler.abort(numbers[found.index])

        def lagging() -> bool:
            done = (steps.done(reader) for reader in range(steps.ring.layout.readers))
            return min(done, default=scheduler.pipeline.planned) < scheduler.pipeline.planned

        while waiting or not scheduler.idle or lagging() or scheduler.pipeline.retiring:
            while waiting and (not job.stagger or turn % job.stagger == 0):
                numbers.append(self.admit(waiting.pop(0)))
                answers[numbers[-1]] = Answer([], [], [], [])
                if job.stagger:
                    break
            abort(POINTS[0])
            plan = leader.plan()
            if plan is not None:
                leader.launch(plan)
            abort(POINTS[1])
            failed: list[RowFailed] = scheduler.take_refusals()
            landed = leader.collect(flush=plan is None)
            if landed is not None:
                failed += landed.failed
                _note(landed.batch, answers)
            for failure in failed:
                answers[failure.request].failed.append(failure)
            abort(POINTS[2])
            turn += 1
        pages = scheduler.nodes[0].ledger.statistics()
        counts = scheduler.statistics()
        owner = self.slab
        assert isinstance(owner, SlabOwner)
        found = {
            "total": pages.total,
            "free": pages.free,
            "cached": pages.cached,
            "held": pages.held,
            "promised": pages.promised,
            "leased": owner.leased,
            "slots": scheduler.nodes[0].slots.free,
            "cached_tokens": counts.cached_tokens,
            "aborted": counts.aborted,
            "preempted": counts.preempted,
            "stale": counts.stale_results,
        }
        return list(answers.values()), turn, found


def _note(batch: Any, answers: dict[int, Answer]) -> None:
    for row in range(0 if batch is None else batch.token.size):
        answer = answers[int(batch.request[row])]
        answer.tokens.append(int(batch.token[row]))
        if batch.finish[row]:
            answer.finish.append(int(batch.finish[row]))


def _serve(end: Connection, rank: int, world: int, meeting: Any) -> None:
    """A rank's process: does what the test says until it hangs up, or until something fails."""
    path = f"/proc/self/fd/{meeting.detach()}"
    own: _Rank | None = None
    try:
        while True:
            command = end.recv()
            if command[0] == "build":
                fds = [reduction.recv_handle(end), reduction.recv_handle(end)]
                own = None
                own = _Rank(rank, world, path, command, fds)
                end.send(("built", None))
            elif own is not None and rank == 0:
                ran = own.generate(command[1])
                end.send(("ran", (ran, own.books())))
            elif own is not None:
                while not end.poll():
                    if not own.follower.turn():
                        time.sleep(_NAP)
                end.recv()  # the leader has done its job
                own.follower.turn()
                end.send(("ran", (None, own.books())))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - the test hears of it, and the process ends as a rank's does
        end.send(("failed", f"{type(error).__name__}: {error}"))
