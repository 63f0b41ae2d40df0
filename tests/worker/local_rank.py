"""A rank in this process: the real scheduler, engine and model, without actors, rings or loop."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.config.schema import Deployment, RankConfig
from mstar.messages.prefix import page_digests
from mstar.messages.request import Admit, Sampling
from mstar.messages.step import Bind, open_plan
from mstar.messages.tokens import RowFailed
from mstar.worker.engine import build_engine
from mstar.worker.late import Constraint
from mstar.worker.leader import Leader
from mstar.worker.scheduler import REPLAYS_SLAB, MicroScheduler
from shm.slab import SlabHandle
from shm.steps import StepLayout
from tests.worker.null_rank import SALT, Replays, Steps

__all__ = ["Answer", "LocalRank", "Prompt"]


class Prompt(NamedTuple):
    """One sequence to generate."""

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling(temperature=0.0)
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    constraint: Constraint | None = None


class Answer(NamedTuple):
    """What came back: token ids, finish code, and per token (logprob, {id: logprob}) when asked for."""

    tokens: list[int]
    finish: list[int]
    failed: list[RowFailed]
    scores: list[tuple[float, dict[int, float]]]


class LocalRank:
    """Generates whole batches. ``stagger`` admits a sequence every so many turns instead of all at once."""

    def __init__(self, directory: Path, *, horizon_tokens: int | None = None, **deployment: object) -> None:
        config = RankConfig(0, Deployment(model="local", **deployment), "local", str(directory))  # type: ignore[arg-type]
        self._prompts: dict[int, NDArray[np.int32]] = {}
        self.replays = Replays()
        self.engine = build_engine(config, self._input, lambda *stage: None)
        limits = self.engine.limits
        limits = limits._replace(mask_bytes=-(-self.engine.runner.vocab_size // 8))
        if horizon_tokens is not None:
            limits = limits._replace(horizon_tokens=horizon_tokens)
        grants = 2 * limits.slots + limits.pages_of(limits.max_seq_len + limits.batch_tokens)
        self._steps = Steps(StepLayout(limits.slots, grants, limits.tail_bytes, 4, 0))
        self.scheduler = MicroScheduler(limits, self._steps.begin, self.replays, salt=SALT)
        self.leader = Leader(self.scheduler, self.engine.executor, self._steps, 0, 4)
        self._salt = SALT if limits.prefix_cache else b""
        self._page_size = limits.page_size
        self._request = 0

    def _input(self, bind: Bind) -> NDArray[np.int32]:
        source = bind.inputs[0]
        if source.slab == REPLAYS_SLAB:
            return np.frombuffer(self.replays.view(source.handle), np.int32)
        return self._prompts[bind.request]

    def generate(self, prompts: list[Prompt], *, stagger: int = 0) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = list(prompts)
        turns = 0
        while waiting or not self.scheduler.idle:
            while waiting and (not stagger or turns % stagger == 0):
                answers[self._admit(waiting.pop(0))] = Answer([], [], [], [])
                if stagger:
                    break
            turns += 1
            self._turn(answers)
        return list(answers.values())

    def _admit(self, prompt: Prompt) -> int:
        self._request += 1
        request = self._request
        tokens = np.array(prompt.tokens, np.int32)
        self._prompts[request] = tokens
        message = Admit(
            request,
            0,
            SlabHandle(0, 0, tokens.nbytes),
            tokens.size,
            prompt.max_tokens,
            prompt.sampling,
            prompt.stop_ids,
            prompt.min_tokens,
        )
        digests = page_digests(tokens, self._page_size, self._salt) if self._salt else b""
        held_to = () if prompt.constraint is None else (prompt.constraint,)
        self.scheduler.admit(message, tokens, digests, lambda: None, held_to)
        return request

    def _turn(self, answers: dict[int, Answer]) -> None:
        plan = self.leader.plan()
        if plan is not None:
            self.leader.launch(open_plan(plan.seq, self._steps.begin(plan.seq)))
        failed = self.scheduler.take_refusals()
        landed = self.leader.collect(flush=plan is None)
        if landed is not None:
            failed += landed.failed
            batch = landed.batch
            for row in range(0 if batch is None else batch.token.size):
                assert batch is not None
                answer = answers[int(batch.request[row])]
                answer.tokens.append(int(batch.token[row]))
                if batch.finish[row]:
                    answer.finish.append(int(batch.finish[row]))
                if batch.logprob is not None and batch.top_ids is not None and batch.top_logprobs is not None:
                    tops = zip(batch.top_ids[row].tolist(), batch.top_logprobs[row].tolist(), strict=True)
                    answer.scores.append((float(batch.logprob[row]), dict(tops)))
        for failure in failed:
            answers[failure.request].failed.append(failure)
