"""The gateway's books without its sockets: the real RequestBook, TextStream and Conductor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.conductor.book import Conductor
from mstar.conductor.errors import NoDecider, Overloaded
from mstar.gateway.book import RequestBook
from mstar.gateway.errors import ApiError, as_api_error, internal, overloaded, starting
from mstar.gateway.request import CANCELLED, DONE, Choice, Request
from mstar.gateway.text import TextStream, Vocabulary
from mstar.messages.prefix import DIGEST_BYTES, block_bytes, page_digests, write_prompt
from mstar.messages.request import Abort, Admit, Sampling, encode_control
from mstar.messages.tokens import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    RankReport,
    RowFailed,
    TokenBatch,
    decode_tokens,
)
from mstar.simulation.channels import Channel, Delay, VirtualSlab
from mstar.simulation.clock import VirtualClock
from mstar.simulation.invariants import Broken, ClientAudit
from mstar.simulation.oracle import Oracle, Sequence, text_of
from mstar.worker.limits import Limits
from shm.errors import SlabExhausted

__all__ = ["Ask", "TokenEvent", "VirtualGateway"]

_REFUSALS = frozenset({400, 429, 503})


class TokenEvent(NamedTuple):
    """What a client saw of one sequence: a token at ``index``, or its failure (index -1, finish ERROR)."""

    time_ns: int
    request: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    finish: int


class Ask(NamedTuple):
    """What a client asks for. ``stop_at`` and ``text_at``: the place, from 1, of the token whose id, or whose
    text, is the stop; 0 is none. ``refused``: the model cannot prepare it. ``late``: it draws under masks.
    """

    request: int
    prompt: NDArray[np.int32]
    max_tokens: int
    node: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    stop_at: int = 0
    text_at: int = 0
    refused: bool = False
    late: bool = False


class _Bytes:
    """A vocabulary in which every token has a text of its own."""

    special_ids: frozenset[int] = frozenset()
    has_bytes = True

    def token_bytes(self, token: int) -> bytes | None:
        return text_of(token).encode()

    def decode(self, tokens: object, *, skip_special_tokens: bool) -> str:
        raise NotImplementedError


_VOCABULARY = Vocabulary(_Bytes())
_FINISHES = {"stop": STOP, "length": LENGTH}


class VirtualGateway:
    """Owns the requests. ``unexplained`` are errors that clients got for nothing that was planted."""

    def __init__(
        self,
        clock: VirtualClock,
        nodes: tuple[Limits, ...],
        oracle: Oracle,
        salt: bytes,
        capacity: int,
        delay: Delay,
        on_event: Callable[[TokenEvent], None],
    ) -> None:
        self.book = RequestBook()
        self.conductor = Conductor(1, capacity)
        self.clients = ClientAudit()
        self.unexplained: list[str] = []
        self._clock = clock
        self._nodes = nodes
        self._oracle = oracle
        self._salt = salt
        self._delay = delay
        self._on_event = on_event
        self._admissions: Channel[bytes] | None = None
        self._tokens: Channel[bytes] | None = None
        self._prompts: VirtualSlab | None = None
        self._aborts: deque[int] = deque()
        self._due: dict[int, Sequence] = {}
        self._planted: set[int] = set()
        self._scheduled = False

    # ---- the cell comes and goes -------------------------------------------------------------

    def ready(self, admissions: Channel[bytes], tokens: Channel[bytes], prompts: VirtualSlab) -> None:
        """A cell takes requests."""
        self._admissions, self._tokens, self._prompts = admissions, tokens, prompts
        self.conductor.ready(0)

    def lost(self, reason: str) -> None:
        """The cell died: take what it had sent, then end what it served, each with one error."""
        if self._tokens is not None:
            for record in self._tokens.salvage():
                self._take(record)
        self._admissions = self._tokens = self._prompts = None
        self._aborts.clear()
        for number in self.conductor.lost(0):
            request = self.book.find(number)
            if request is not None:
                self.book.fail(request, internal(f"The cell ended: {reason}", code="rank_lost"), abort=False)
        self._settle()

    # ---- clients -----------------------------------------------------------------------------

    def submit(self, ask: Ask) -> None:
        """A client's request arrives. Refused or not, each of its sequences ends once."""
        ids = range(ask.request, ask.request + ask.count)
        stop_ids: tuple[int, ...] = ()
        for id in ids:
            self.clients.opened(id)
            due = self._oracle.foresee(id, ask.prompt, ask.max_tokens, refused=ask.refused, late=ask.late)
            if ask.stop_at:
                stop_ids = stop_ids or (due.generated(ask.stop_at),)
                due = due.until(stop_ids[0])
            if ask.text_at:
                due = due.until(due.generated(ask.text_at))
            self._due[id] = due
            if ask.refused:
                self._planted.add(id)
        try:
            self.conductor.place(ask.request)
        except Overloaded as error:
            self._refuse(ids, as_api_error(error))
            return
        except NoDecider:
            self._refuse(ids, starting("restarting"))
            return
        choices = [
            Choice(id, place, self._stream(id, ask), max_tokens=ask.max_tokens)
            for place, id in enumerate(ids)
        ]
        request = Request(
            ask.request,
            choices,
            self,
            decider=0,
            prompt_tokens=ask.prompt.size,
            started=self._clock.now / 1e9,
            native=True,
        )
        refusal = self._admit(ask, stop_ids)
        if refusal is not None:
            self.conductor.ended(ask.request)
            self._refuse(ids, refusal)
            return
        self.book.open(request)

    def disconnect(self, number: int) -> None:
        """The client of a request went away."""
        request = self.book.find(number)
        if request is not None:
            self.book.cancel(request)
            self._settle()

    def abort(self, number: int) -> None:
        """The gateway ends a request itself, with an error."""
        request = self.book.find(number)
        if request is not None:
            self._planted.update(choice.id for choice in request.choices)
            self.book.fail(request, ApiError(503, "The server stops.", code="draining"))
            self._settle()

    # ---- from the cell -----------------------------------------------------------------------

    def wake(self) -> None:
        """Records may have arrived, or there is room for aborts."""
        if not self._scheduled:
            self._scheduled = True
            self._clock.after(self._delay.draw(), self._drain)

    def flush(self, request: Request) -> None:
        """The sink of every request: what the client sees."""
        now, clients = self._clock.now, self.clients
        for choice in request.choices:
            if choice.told or not choice.changed:
                continue
            id, due = choice.id, self._due[choice.id]
            delta = choice.take()
            finish = _FINISHES[delta.reason] if delta.reason is not None else RUNNING
            for place, token in enumerate(delta.tokens, 1):
                index = clients.got[id]
                clients.token(id, index, token, int(due.tokens[due.prompt + index]))
                last = place == len(delta.tokens)
                self._on_event(TokenEvent(now, id, index, finish if last else RUNNING))
            if delta.reason is not None:
                clients.ended(id, finish, due.due)
                if finish != due.finish:
                    raise Broken("end", f"sequence {id} ended as {delta.reason}, due is {due.finish}")
        if request.outcome is not None and request.outcome != DONE:
            self._failed(request)

    def check_idle(self) -> None:
        """No request lives and nothing was lost on the way. Raises Broken."""
        counts = self.book.statistics()
        if counts.requests or counts.sequences or self.conductor.live:
            raise Broken(
                "idle", f"the gateway is idle with {counts.requests} requests, {counts.sequences} sequences"
            )
        if counts.gaps:
            raise Broken("gap", f"{counts.gaps} tokens came out of order")
        if self._prompts is not None and len(self._prompts):
            raise Broken("idle", f"{len(self._prompts)} prompts are leased while the house is idle")
        self.clients.finished()

    def _drain(self) -> None:
        self._scheduled = False
        if self._tokens is None:
            return
        while (record := self._tokens.receive()) is not None:
            self._take(record)
        self._settle()
        self._flush_aborts()

    def _take(self, record: bytes) -> None:
        message = decode_tokens(memoryview(record))
        if isinstance(message, TokenBatch):
            self.book.apply(message, self._clock.now / 1e9)
        elif isinstance(message, RowFailed):
            self.book.row_failed(message)
        elif not isinstance(message, RankReport):
            raise TypeError(f"{message!r} came on a token ring")

    def _settle(self) -> None:
        book = self.book
        for request in book.take_touched():
            self.flush(request)
        for request in book.take_ended():
            self.conductor.ended(request.number)
        self._aborts.extend(id for _, id in book.take_aborts())
        self._flush_aborts()

    def _flush_aborts(self) -> None:
        aborts, ring = self._aborts, self._admissions
        while aborts and ring is not None and ring.send(encode_control(Abort(aborts[0])), control=True):
            aborts.popleft()

    # ---- the parts of an admission -----------------------------------------------------------

    def _stream(self, id: int, ask: Ask) -> TextStream:
        if not ask.text_at:
            return TextStream(_VOCABULARY)
        return TextStream(_VOCABULARY, (text_of(self._due[id].generated(ask.text_at)),))

    def _admit(self, ask: Ask, stop_ids: tuple[int, ...]) -> ApiError | None:
        ring, slab, limits = self._admissions, self._prompts, self._nodes[ask.node]
        if ring is None or slab is None:
            return starting("restarting")
        digests = page_digests(ask.prompt, limits.page_size, self._salt) if limits.prefix_cache else b""
        hashes = len(digests) // DIGEST_BYTES
        try:
            handle = slab.lease(block_bytes(ask.prompt.size, hashes))
        except SlabExhausted:
            return overloaded("Too many prompts wait to be served.")
        write_prompt(slab.view(handle), ask.prompt, digests)
        message = Admit(
            request=ask.request,
            attempt=0,
            prompt=handle,
            prompt_tokens=ask.prompt.size,
            max_tokens=ask.max_tokens,
            sampling=Sampling(),
            stop_ids=stop_ids,
            count=ask.count,
            hashes=hashes,
            node=ask.node,
        )
        if not ring.send(encode_control(message)):
            slab.release(handle)
            return overloaded("Too many prompts wait to be served.")
        return None

    def _refuse(self, ids: range, error: ApiError) -> None:
        for id in ids:
            self._end(id, error)

    def _failed(self, request: Request) -> None:
        for choice in request.choices:
            if choice.reason is not None or choice.id in self.clients.ends:
                continue
            if request.outcome == CANCELLED:
                self.clients.ended(choice.id, ERROR, None)
                continue
            error = request.failure
            assert error is not None
            self._end(choice.id, error)

    def _end(self, id: int, error: ApiError) -> None:
        self.clients.ended(id, ERROR, None)
        self._on_event(TokenEvent(self._clock.now, id, -1, ERROR))
        explained = error.status in _REFUSALS or error.code == "rank_lost" or id in self._planted
        if not explained and "has no memory" not in error.message:
            self.unexplained.append(f"sequence {id}: {error.status} {error.message}")
