"""The service behind both protocols: accepts requests, sends them to deciders, hands out what comes back.

One object on one loop. It joins the plain classes (RequestBook, Conductor, Intake) to the rings; the
protocols call `enter`, `prepare`, `submit` and `cancel`, the rings call `drain`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from mstar.conductor.book import Conductor, ConductorStatistics
from mstar.conductor.errors import NoDecider, Overloaded
from mstar.gateway.admission import Admission, AdmissionStatistics, Prompt
from mstar.gateway.book import BookStatistics, RequestBook
from mstar.gateway.errors import ApiError, as_api_error, draining, internal, starting
from mstar.gateway.intake import Intake, Recipe
from mstar.gateway.latency import Latencies
from mstar.gateway.request import Choice, Render, Request, Sink
from mstar.gateway.text import TextStream, Vocabulary
from mstar.gateway.tokenize import PoolStatistics, WorkPool
from mstar.gateway.tuning import Tuning
from mstar.messages.tokens import RankReport, RowFailed, TokenBatch, decode_tokens
from mstar.validation.errors import RequestInvalid
from shm.errors import ShmError

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["Service", "ServiceStatistics"]

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """A native connection, as far as a drain is concerned."""

    @property
    def idle(self) -> bool: ...

    def close(self) -> None: ...


class ServiceStatistics(NamedTuple):
    """Everything the gateway counts: its parts' snapshots and its own."""

    book: BookStatistics
    conductor: ConductorStatistics
    admissions: tuple[AdmissionStatistics, ...]
    pool: PoolStatistics
    reports: dict[str, RankReport]
    malformed: int
    slow_readers: int
    refused: dict[int, int]
    prompt_tokens: int
    generated_tokens: int


class Service:
    """See the module. ``ranks`` are the actors that decide, by index; ``capacity`` the requests accepted."""

    def __init__(
        self,
        ctx: Context,
        intake: Intake,
        *,
        ranks: tuple[str, ...],
        capacity: int,
        fingerprint: str,
        tuning: Tuning,
        clock: Callable[[], float],
    ) -> None:
        self.ctx = ctx
        self.intake = intake
        self.ranks = ranks
        self.fingerprint = fingerprint
        self.tuning = tuning
        self.clock = clock
        self.vocabulary = Vocabulary(intake.tokenizer)
        self.latencies = Latencies()
        self.book = RequestBook(on_first=self.latencies.first.add, on_gap=self.latencies.gap.add)
        self.conductor = Conductor(len(ranks), capacity, seed=secrets.randbits(32))
        self.admissions = [Admission(ctx, index) for index in range(len(ranks))]
        self.pool = WorkPool(tuning.threads, capacity)
        self.draining = False
        self.reports: dict[str, RankReport] = {}
        self.slow_readers = 0
        self.connections: set[Connection] = set()
        self.responding = 0
        self._ids = count(secrets.randbits(62))
        self._malformed = 0
        self._refused: dict[int, int] = {}
        self._prompt_tokens = self._generated_tokens = 0

    # ---- from the protocols ------------------------------------------------------------------

    def enter(self) -> int:
        """Take a place for a request before its body is looked at; returns its number.

        Raises ApiError 429 or 503, at once. `submit` uses the place; without it, call `leave`.
        """
        if self.draining:
            raise draining()
        number = next(self._ids)
        try:
            self.conductor.place(number)
        except Overloaded as error:
            raise as_api_error(error) from error
        except NoDecider as error:
            raise starting(self.stage()) from error
        return number

    def leave(self, number: int) -> None:
        """Give a place back that was not used."""
        if self.book.find(number) is None:
            self.conductor.ended(number)

    async def work(self, size: int, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run intake work on the loop where the body is small, on a thread where it is not."""
        try:
            if size <= self.tuning.inline_bytes:
                return work(*args, **kwargs)
            return await self.pool.run(work, *args, **kwargs)
        except RequestInvalid as error:
            raise as_api_error(error) from error

    async def prepare(
        self, kind: str, body: bytes | Mapping[str, Any], size: int, *, model_required: bool = True
    ) -> Recipe:
        """Check and tokenize a body. Raises ApiError."""
        recipe: Recipe = await self.work(size, self.intake.recipe, kind, body, model_required=model_required)
        return recipe

    def submit(
        self, number: int, recipe: Recipe, sink: Sink, *, native: bool = False, render: Render | None = None
    ) -> Request:
        """Send a request to its decider. Raises ApiError; then nothing was accepted."""
        if self.draining:
            raise draining()
        decider = self.conductor.serves(number)
        if decider is None:  # its decider died while the prompt was tokenized
            try:
                decider = self.conductor.place(number)
            except (Overloaded, NoDecider) as error:
                raise as_api_error(error) from error
        choices: list[Choice] = []
        prompts: list[Prompt] = []
        body = recipe.request
        for tokens, digests, most in zip(recipe.prompts, recipe.digests, recipe.max_tokens, strict=True):
            first = len(choices)
            ids = [next(self._ids) for _ in range(body.n)]
            for index, id in enumerate(ids, first):
                stream = TextStream(self.vocabulary, body.stop)
                choices.append(Choice(id, index, stream, max_tokens=most, top=body.scores))
            sampling = msgspec.structs.replace(recipe.sampling, choice=first)
            prompts.append(
                Prompt(ids[0], tokens, body.n, most, body.min_tokens, sampling, recipe.stop_ids, digests)
            )
        request = Request(
            number,
            choices,
            sink,
            decider=decider,
            prompt_tokens=recipe.prompt_tokens,
            started=self.clock(),
            native=native,
            render=render,
        )
        self.admissions[decider].admit(prompts)
        self.book.open(request)
        return request

    def cancel(self, request: Request) -> None:
        """The client is gone, or done; a request that ended already is left alone."""
        self.book.cancel(request)
        self.settle()

    def fail(self, request: Request, error: ApiError) -> None:
        """End a request with an error."""
        self.book.fail(request, error)
        self.settle()

    def refused(self, status: int) -> None:
        """Count an answer that was an error."""
        self._refused[status] = self._refused.get(status, 0) + 1

    # ---- from the deciders -------------------------------------------------------------------

    def drain(self) -> bool:
        """Take what deciders sent, a bounded number of records; True if more is there."""
        more = False
        for index in range(len(self.ranks)):
            more |= self._drain(index, self.tuning.records_per_drain)
            self.admissions[index].flush()
        self.settle()
        return more

    def lost(self, rank: str, reason: str) -> None:
        """A decider died: take what it had sent, then end what it served, each with one error."""
        index = self.ranks.index(rank)
        while self._drain(index, self.tuning.records_per_drain):
            pass
        self.admissions[index].reset()
        self.reports.pop(rank, None)
        for number in self.conductor.lost(index):
            request = self.book.find(number)
            if request is not None:
                error = internal(f"The process that served this request ended: {reason}", code="rank_lost")
                self.book.fail(request, error, abort=False)
        self.settle()

    def ready(self, rank: str) -> None:
        """A decider takes requests."""
        self.conductor.ready(self.ranks.index(rank))

    def settle(self) -> None:
        """Pass on what changed in the book: to sinks, to the conductor, to deciders."""
        book = self.book
        for request in book.take_touched():
            try:
                request.sink.flush(request)
            except Exception:  # noqa: BLE001 - one request's sink must not end everybody's gateway
                _log.exception("request %d could not be passed on", request.number)
                book.fail(request, internal("The answer could not be written."))
        for request in book.take_ended():
            self.conductor.ended(request.number)
            usage = request.usage
            self._prompt_tokens += usage.prompt_tokens
            self._generated_tokens += usage.completion_tokens
            self.latencies.whole.add(self.clock() - request.started)
        for decider, id in book.take_aborts():
            self.admissions[decider].abort(id)

    def _drain(self, index: int, limit: int) -> bool:
        reader = self.ctx.inbox[f"tokens/{index}"]
        try:
            for _ in range(limit):
                record = reader.peek()
                if record is None:
                    return False
                try:
                    self._take(index, decode_tokens(record))
                except (msgspec.DecodeError, ShmError, ValueError) as error:
                    self._malformed += 1
                    _log.warning(
                        "a record of %d bytes from %s does not decode: %s",
                        record.nbytes,
                        self.ranks[index],
                        error,
                    )
                finally:
                    reader.release()
        except ShmError as error:
            _log.warning("the token ring of %s cannot be read on: %s", self.ranks[index], error)
            return False
        return reader.has_data()

    def _take(self, index: int, message: TokenBatch | RowFailed | RankReport) -> None:
        if isinstance(message, TokenBatch):
            self.book.apply(message, self.clock())
        elif isinstance(message, RowFailed):
            self.book.row_failed(message)
        else:
            self.reports[self.ranks[index]] = message

    # ---- what it shows -----------------------------------------------------------------------

    def stage(self) -> str:
        """What the ranks are doing, as far as they are not ready: ``rank/0: loading 3/12``."""
        stages = self.stages()
        return "; ".join(f"{rank}: {stage}" for rank, stage in stages.items()) or "starting"

    def stages(self) -> dict[str, str]:
        """The stage of each rank by its name."""
        lines = self.ctx.lines
        return {rank: lines[rank].stage_name or "starting" for rank in self.ranks if rank in lines}

    @property
    def open(self) -> bool:
        """Whether new requests are taken."""
        return not self.draining and self.conductor.any_ready

    def statistics(self) -> ServiceStatistics:
        """A snapshot of everything."""
        return ServiceStatistics(
            self.book.statistics(),
            self.conductor.statistics(),
            tuple(admission.statistics() for admission in self.admissions),
            self.pool.statistics(),
            dict(self.reports),
            self._malformed,
            self.slow_readers,
            dict(self._refused),
            self._prompt_tokens,
            self._generated_tokens,
        )
