"""RequestBook: who owns a request. What was accepted, what has come, what may leave, and how it ended.

Plain and synchronous: rows go in, deltas and ends come out, time is passed in. A row counts only if its
attempt and index are the ones that are due. Every request ends exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mstar.gateway.errors import ApiError, internal, overloaded
from mstar.gateway.request import CANCELLED, DONE, FAILED, Choice, Request
from mstar.messages.tokens import ERROR, RUNNING, STOP, RowFailed, TokenBatch

__all__ = ["BookStatistics", "RequestBook"]


class BookStatistics(NamedTuple):
    """Live requests and sequences; rows taken, dropped as stale, and out of order; ends by outcome."""

    requests: int
    sequences: int
    rows: int
    stale: int
    gaps: int
    outcomes: dict[str, int]
    reasons: dict[str, int]


class RequestBook:
    """All requests of one gateway, by the internal id of their sequences.

    After `apply`, `row_failed`, `fail` or `cancel` the caller takes what changed with `take_touched`, what
    ended with `take_ended`, and the sequences that deciders must drop with `take_aborts`.
    """

    def __init__(
        self,
        *,
        on_first: Callable[[float], None] = lambda seconds: None,
        on_gap: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._choices: dict[int, Choice] = {}
        self._requests: dict[int, Request] = {}
        self._touched: list[Request] = []
        self._ended: list[Request] = []
        self._aborts: list[tuple[int, int]] = []
        self._on_first = on_first
        self._on_gap = on_gap
        self._rows = self._stale = self._gaps = 0
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def open(self, request: Request) -> None:
        """Write down a request before its sequences are sent to a decider."""
        self._requests[request.number] = request
        for choice in request.choices:
            choice.last = request.started
            self._choices[choice.id] = choice

    def apply(self, batch: TokenBatch, now: float) -> None:
        """Take the rows of one step. Late rows are counted and dropped; a gap fails its request."""
        find = self._choices.get
        scored = batch.logprob is not None
        rows = zip(
            batch.request.tolist(),
            batch.attempt.tolist(),
            batch.index.tolist(),
            batch.token.tolist(),
            batch.finish.tolist(),
            strict=True,
        )
        row = -1
        for id, attempt, index, token, finish in rows:
            row += 1
            choice = find(id)
            if choice is None or attempt != choice.attempt:
                self._stale += 1
                continue
            if index != choice.count:
                self._gap(choice, index)
                continue
            request = choice.owner
            if finish == ERROR:
                self.fail(request, internal("The model failed on this request."))
                continue
            choice.count = index + 1
            if index:
                self._on_gap(now - choice.last)
            elif request.first is None:
                request.first = now
                self._on_first(now - request.started)
            choice.last = now
            if not request.touched:
                request.touched = True
                self._touched.append(request)
            hidden = finish == STOP
            stream = choice.stream
            if scored and choice.top >= 0 and (request.native or not hidden):
                self._score(choice, batch, row, token)
            if request.native:
                choice.tokens.append(token)
            if not hidden:
                text = stream.push(token)
                if text:
                    choice.texts.append(text)
                if stream.stopped:
                    self._finish(choice, "stop", abort=finish == RUNNING)
                    continue
                if choice.waiting:
                    self._release(choice)
            if finish != RUNNING:
                self._finish(choice, "stop" if hidden else "length")
            elif index + 1 >= choice.max_tokens:
                self._finish(choice, "length", abort=True)

    def row_failed(self, event: RowFailed) -> None:
        """A decider gave up on a sequence: its whole request fails."""
        choice = self._choices.get(event.request)
        if choice is None or choice.attempt != event.attempt:
            self._stale += 1
            return
        busy = event.status == 429
        error = overloaded(event.message) if busy else internal(event.message, status=event.status)
        self.fail(choice.owner, error)

    def fail(self, request: Request, error: ApiError, *, abort: bool = True) -> None:
        """End a request with an error, once; later calls change nothing. ``abort``: its decider lives."""
        if request.outcome is None:
            request.failure = error
            self._end(request, FAILED, abort=abort)

    def cancel(self, request: Request) -> None:
        """The client went away: end a request without a word, once."""
        if request.outcome is None:
            self._end(request, CANCELLED, abort=True)

    def find(self, number: int) -> Request | None:
        """A live request by its number."""
        return self._requests.get(number)

    @property
    def requests(self) -> Iterable[Request]:
        """The live requests, oldest first."""
        return list(self._requests.values())

    @property
    def live(self) -> int:
        """How many requests are live."""
        return len(self._requests)

    def take_touched(self) -> list[Request]:
        """Requests with something new for their sinks, each once."""
        touched, self._touched = self._touched, []
        for request in touched:
            request.touched = False
        return touched

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call, each once in its life."""
        ended, self._ended = self._ended, []
        return ended

    def take_aborts(self) -> list[tuple[int, int]]:
        """(decider, sequence id) that are no longer wanted."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def statistics(self) -> BookStatistics:
        """A snapshot of the book."""
        return BookStatistics(
            len(self._requests),
            len(self._choices),
            self._rows_of_live(),
            self._stale,
            self._gaps,
            dict(self._outcomes),
            dict(self._reasons),
        )

    def _rows_of_live(self) -> int:
        return self._rows + sum(choice.count for choice in self._choices.values())

    def _gap(self, choice: Choice, index: int) -> None:
        self._gaps += 1
        self.fail(
            choice.owner,
            internal(f"Token {choice.count} of this request was lost (token {index} came); send it again."),
        )

    def _score(self, choice: Choice, batch: TokenBatch, row: int, token: int) -> None:
        request = choice.owner
        if (
            batch.logprob is None
            or batch.top_ids is None
            or batch.top_logprobs is None
            or request.render is None
        ):
            return
        top = choice.top
        place = choice.stream.position
        ids, values = batch.top_ids[row, :top].tolist(), batch.top_logprobs[row, :top].tolist()
        rendered = request.render(token, float(batch.logprob[row]), ids, values, place)
        if request.native:
            choice.scores.append(rendered)
        else:
            choice.waiting.append((place, rendered))

    def _release(self, choice: Choice) -> None:
        """Let log-probabilities go with the text of their tokens, and all of them once nothing is held."""
        waiting, stream = choice.waiting, choice.stream
        if not stream.pending:
            choice.scores.extend([rendered for _, rendered in waiting])
            waiting.clear()
            return
        ready = 0
        while ready < len(waiting) and waiting[ready][0] < stream.delivered:
            choice.scores.append(waiting[ready][1])
            ready += 1
        del waiting[:ready]

    def _finish(self, choice: Choice, reason: str, *, abort: bool = False) -> None:
        stream = choice.stream
        text = stream.flush()
        if text:
            choice.texts.append(text)
        if stream.stopped:
            reason, end = "stop", stream.delivered
            choice.scores.extend([rendered for place, rendered in choice.waiting if place < end])
        else:
            choice.scores.extend([rendered for _, rendered in choice.waiting])
        choice.waiting.clear()
        choice.reason = reason
        self._reasons[reason] += 1
        request = choice.owner
        self._close(choice)
        if abort:
            self._aborts.append((request.decider, choice.id))
        request.live -= 1
        if not request.live:
            self._end(request, DONE, abort=False)

    def _close(self, choice: Choice) -> None:
        if self._choices.pop(choice.id, None) is not None:
            self._rows += choice.count

    def _end(self, request: Request, outcome: str, *, abort: bool) -> None:
        request.outcome = outcome
        for choice in request.choices:
            if choice.reason is None:
                self._close(choice)
                if abort:
                    self._aborts.append((request.decider, choice.id))
        self._requests.pop(request.number, None)
        self._outcomes[outcome] += 1
        self._ended.append(request)
        if not request.touched:
            request.touched = True
            self._touched.append(request)
