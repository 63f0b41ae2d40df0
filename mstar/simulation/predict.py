"""A prediction: a workload's requests sent into a simulated deployment, and what their clients would see."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from mstar.messages.tokens import ERROR, RUNNING
from mstar.simulation.cell import StepRecord
from mstar.simulation.cost import Cost
from mstar.simulation.figures import Answer, Figures, figures_of, victims_of
from mstar.simulation.gateway import TokenEvent
from mstar.simulation.setting import Setting, check_fits
from mstar.simulation.workloads import Job, Workload, schedule
from mstar.simulation.world import World

__all__ = ["Prediction", "Step", "predict"]

_NS = 1e9
_TURN_NS = 1_000
"""What passes between a client's seeing the last first token and its sending of a wave."""


class Step(NamedTuple):
    """A step: when it was planned and when it landed, in seconds, and what it ran."""

    planned: float
    landed: float
    decodes: int
    chunk_tokens: int
    rows: int


class Prediction(msgspec.Struct, frozen=True):
    """What a run would look like. ``figures`` are by group: "all", each group, and the victims of a wave.

    ``answers`` are in the order in which they were sent, ``steps`` in theirs; ``seconds`` is when the last
    answer ended. ``pages_peak`` is the most pages that were held at once.
    """

    workload: str
    cost: str
    seed: int
    ranks: int
    seconds: float
    figures: dict[str, Figures]
    preempted: int
    refused: int
    pages_total: int
    pages_peak: int
    answers: list[Answer]
    steps: list[Step]


def predict(
    setting: Setting,
    workload: Workload,
    cost: Cost,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Prediction:
    """Run ``workload`` to its end under a virtual clock; ``progress`` hears (tokens so far, tokens due).

    The same arguments give the same prediction. Raises ConfigError for a workload that does not fit.
    """
    jobs, wave = schedule(workload, seed)
    check_fits(setting, workload.name, [*jobs, *wave])
    return _Run(setting, workload, cost, seed, jobs, wave, progress).run()


class _Run:
    """The clients of one workload."""

    def __init__(
        self,
        setting: Setting,
        workload: Workload,
        cost: Cost,
        seed: int,
        jobs: list[Job],
        wave: list[Job],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._setting = setting
        self._workload = workload
        self._cost = cost
        self._seed = seed
        self._jobs = jobs
        self._wave = wave
        self._progress = progress
        self._line = deque(jobs)
        self._answers: list[Answer] = []
        self._of: dict[int, Answer] = {}
        self._waits_for = len(jobs) if wave else 0
        self._steps: list[Step] = []
        self._pages_peak = 0
        self._tokens = 0
        self._due = sum(job.output_tokens for job in (*jobs, *wave))
        longest = max(job.prompt_tokens + job.output_tokens for job in (*jobs, *wave))
        self._world = World(
            # A window beyond what is asked for changes nothing but the size of every rank's tables.
            setting.limits._replace(max_seq_len=longest),
            ranks=setting.ranks,
            cost=cost,
            seed=seed,
            inline=cost.host.inline,
            capacity=setting.capacity,
            keep=False,
        )
        self._world.on_token = self._on_token
        self._world.on_landed = self._on_landed

    def run(self) -> Prediction:
        if self._workload.concurrency:
            for _ in range(min(self._workload.concurrency, len(self._jobs))):
                self._send(self._line.popleft(), 0)
        else:
            for job in self._jobs:
                self._send(job, round(job.arrival * _NS))
            self._line.clear()
        self._world.run(progress=self._tell)
        counts = self._world.statistics().scheduler
        seconds = max((answer.ended for answer in self._answers if not math.isnan(answer.ended)), default=0.0)
        self._tell(0)
        return Prediction(
            workload=self._workload.name,
            cost=self._cost.model.name,
            seed=self._seed,
            ranks=self._setting.ranks,
            seconds=seconds,
            figures=self._figures(),
            preempted=counts.preempted,
            refused=sum(bool(answer.error) for answer in self._answers),
            pages_total=self._setting.limits.pages,
            pages_peak=self._pages_peak,
            answers=self._answers,
            steps=self._steps,
        )

    def _send(self, job: Job, at_ns: int) -> None:
        """The client sends at ``at_ns``; the deployment hears of it when the way there is over."""
        host = self._cost.host
        way = round(host.submit_ns + host.submit_token_ns * job.prompt_tokens)
        request = self._world.submit(at_ns + way, job.prompt_tokens, job.output_tokens)
        answer = Answer(job.group, job.prompt_tokens, at_ns / _NS)
        self._answers.append(answer)
        self._of[request] = answer

    def _on_token(self, event: TokenEvent) -> None:
        answer = self._of[event.request]
        at_ns = event.time_ns + round(self._cost.host.deliver_ns)
        first = not answer.events
        if event.finish == ERROR:
            answer.error = "refused or failed"
        else:
            self._tokens += 1
            answer.events.append(at_ns / _NS)
        ended = event.finish != RUNNING
        if ended:
            answer.ended = at_ns / _NS
            if self._line:
                self._send(self._line.popleft(), at_ns)
        if self._waits_for and (first or ended):
            self._waits_for -= first
            if not self._waits_for:
                for job in self._wave:
                    self._send(job, at_ns + _TURN_NS + round(job.arrival * _NS))

    def _on_landed(self, record: StepRecord) -> None:
        if not record.rows:
            return
        self._steps.append(
            Step(
                record.planned_ns / _NS,
                record.landed_ns / _NS,
                record.decodes,
                record.chunk_tokens,
                record.rows,
            )
        )
        cell = self._world.cell
        if cell is not None:
            self._pages_peak = max(self._pages_peak, cell.scheduler.nodes[0].ledger.held)

    def _tell(self, now_ns: int) -> None:
        if self._progress is not None:
            self._progress(min(self._tokens, self._due), self._due)

    def _figures(self) -> dict[str, Figures]:
        answers = self._answers
        found = {"all": figures_of(answers)}
        groups = sorted({answer.group for answer in answers})
        if len(groups) > 1:
            found |= {group: figures_of([a for a in answers if a.group == group]) for group in groups}
        if self._wave:
            waves = {job.group for job in self._wave}
            others = [answer for answer in answers if answer.group not in waves]
            found["victims"] = victims_of(others, [answer for answer in answers if answer.group in waves])
        return found
