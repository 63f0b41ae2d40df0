"""GatewayActor: the process that holds the clients' connections, from its sockets to its drain."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from actors.actor import Actor, PeerEvent, PeerLost
from mstar.config.schema import GatewayConfig
from mstar.gateway.app import Routes, build_app
from mstar.gateway.errors import ApiError
from mstar.gateway.front import Front
from mstar.gateway.health import Health
from mstar.gateway.intake import Intake
from mstar.gateway.native import NativeConnection
from mstar.gateway.prefix import Sharing
from mstar.gateway.service import Service
from mstar.gateway.stream import Ticker
from mstar.gateway.tuning import Tuning
from mstar.model.spec import read_generation_defaults, read_spec
from mstar.model.tokenizer import Tokenizer
from mstar.validation.request import Limits

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["GatewayActor"]

_log = logging.getLogger(__name__)
_http_log = logging.getLogger("aiohttp.server")

BACKLOG = 1024
LAST_WORDS = (
    3.0  # seconds for what was ended by the drain to reach its clients; less than a hastened stop has
)


def _quiet(record: logging.LogRecord) -> bool:
    """A client's malformed HTTP is a line of debugging: no stranger may fill the log with tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    record.exc_info, record.levelno, record.levelname = None, logging.DEBUG, "DEBUG"
    return _http_log.isEnabledFor(logging.DEBUG)


def _accept_all_that_is_allowed() -> None:
    """Raise the soft limit of descriptors, often 1024, to the hard one: beyond it, nobody is accepted."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class GatewayActor(Actor):
    """Serves the inherited sockets "tcp" and "uds": HTTP on both, the native protocol on the second too.

    It listens before any rank is ready and answers /ready with 503 and the stage until then. A stop order
    refuses new requests, lets streams finish within the deployment's drain time, and ends the rest with
    one error event each.
    """

    def __init__(self, ctx: Context, tuning: Tuning | None = None) -> None:
        super().__init__(ctx)
        self.config = msgspec.msgpack.decode(ctx.config, type=GatewayConfig)
        self.tuning = tuning or Tuning()
        self._servers: list[asyncio.AbstractServer] = []

    async def setup(self) -> None:
        config, ctx = self.config, self.ctx
        ctx.stage("tokenizer")
        intake = await asyncio.to_thread(_intake, config)
        self.service = Service(
            ctx,
            intake,
            ranks=config.ranks,
            capacity=config.deployment.max_concurrent_requests,
            fingerprint=_fingerprint(config),
            tuning=self.tuning,
            clock=ctx.loop.time,
        )
        ctx.stage("listening")
        _accept_all_that_is_allowed()
        _http_log.addFilter(_quiet)
        self.ticker = Ticker(ctx.loop, self.tuning.tick_seconds)
        routes = Routes(self.service, Health(self.service, config))
        deployment = config.deployment
        app = build_app(
            self.service,
            routes,
            self.ticker,
            api_keys=deployment.listen.api_keys,
            max_body_bytes=deployment.max_body_bytes,
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        http = self._runner.server
        if http is None:
            raise RuntimeError("the HTTP server was not set up")

        def native() -> asyncio.Protocol:
            return NativeConnection(
                self.service, routes.questions, self.ticker, max_frame=deployment.max_body_bytes
            )

        def front() -> asyncio.Protocol:
            return Front(native, http, seconds=self.tuning.preface_seconds)

        if "tcp" in ctx.fds:
            server = await ctx.loop.create_server(http, sock=_socket(ctx.fds["tcp"]), backlog=BACKLOG)
            self._servers.append(server)
        if "uds" in ctx.fds:
            self._servers.append(await _unix_server(ctx.loop, front, _socket(ctx.fds["uds"])))
        ctx.serve(self.service.drain)

    async def run(self) -> None:
        await self.ctx.until_stopping()
        await self._drain()

    async def teardown(self) -> None:
        self.ticker.close()
        for server in self._servers:
            server.close()
        for connection in list(self.service.connections):
            connection.close()
        await self._runner.cleanup()
        await self.service.pool.close()

    def on_peer(self, event: PeerEvent) -> None:
        if event.actor not in self.config.ranks:
            return
        if isinstance(event, PeerLost):
            self.service.lost(event.actor, event.reason)
        else:
            self.service.ready(event.actor)

    async def _drain(self) -> None:
        service, loop = self.service, self.ctx.loop
        service.draining = True
        seconds = self.config.deployment.drain_seconds
        end = loop.time() + seconds
        _log.info("draining: %d requests, at most %g s", service.book.live, seconds)
        # Three conditions of three owners, watched for the seconds of a drain only.
        while service.book.live and loop.time() < end and not self.ctx.hastened:  # noqa: ASYNC110
            await asyncio.sleep(self.tuning.tick_seconds)
        left = list(service.book.requests)
        if left:
            _log.info("drained: %d requests are ended before they were done", len(left))
        for request in left:
            service.fail(
                request, ApiError(503, "The server stopped before this request was done.", code="draining")
            )
        await self._last_words()

    async def _last_words(self) -> None:
        """Let what was written last reach its clients, within reason."""
        loop = self.ctx.loop
        end = loop.time() + LAST_WORDS
        while self._busy() and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def _busy(self) -> bool:
        if any(not connection.idle for connection in self.service.connections):
            return True
        return self.service.responding > 0


def _intake(config: GatewayConfig) -> Intake:
    directory, deployment = Path(config.model_directory), config.deployment
    spec = read_spec(directory)
    tokenizer = Tokenizer.load(directory)
    intake = Intake(
        tokenizer,
        Limits(spec.vocab_size, deployment.max_seq_len or spec.max_position),
        read_generation_defaults(directory),
        deployment.served_model_name or (config.model_name,),
        frozenset(spec.eos_token_ids),
        Sharing(deployment.page_size, config.prefix_salt, deployment.prefix_cache),
    )
    tokenizer.encode("The first request must not be the one that warms this up.", add_special_tokens=True)
    return intake


def _fingerprint(config: GatewayConfig) -> str:
    """Changes with what may change the tokens of a seeded request."""
    from mstar import __version__

    deployment = config.deployment
    parts = (__version__, config.model_name, deployment.dtype, deployment.tensor_parallel_size)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def _socket(fd: int) -> socket.socket:
    found = socket.socket(fileno=fd)
    found.setblocking(False)
    return found


async def _unix_server(
    loop: asyncio.AbstractEventLoop, front: Any, sock: socket.socket
) -> asyncio.AbstractServer:
    """The path belongs to the daemon: a loop that would unlink it on close (3.13) is told not to."""
    try:
        return await loop.create_unix_server(front, sock=sock, backlog=BACKLOG, cleanup_socket=False)  # type: ignore[call-arg]
    except TypeError:
        return await loop.create_unix_server(front, sock=sock, backlog=BACKLOG)
