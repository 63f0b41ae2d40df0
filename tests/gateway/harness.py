"""A whole gateway on real sockets with a fake decider behind it, in the test's loop."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai

from mstar.config.schema import Deployment, GatewayConfig, Listen
from mstar.gateway.actor import GatewayActor
from mstar.gateway.tuning import Tuning
from mstar.model.tokenizer import Tokenizer
from tests.gateway.fake_rank import RANK, FakeContext, FakeRank, Script

MODEL = "tiny"
SALT = b"the salt of this start"
TEXT = "The hello of the world, and on it went in the town. "


class Gateway:
    """The running gateway, its rank, and the ways to reach it."""

    def __init__(self, actor: GatewayActor, ctx: FakeContext, rank: FakeRank, port: int, uds: str) -> None:
        self.actor = actor
        self.ctx = ctx
        self.rank = rank
        self.port = port
        self.uds = uds
        self.base = f"http://127.0.0.1:{port}"
        self.run: asyncio.Task[None]

    @property
    def service(self) -> Any:
        return self.actor.service

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.base, timeout=10, trust_env=False)

    def openai(self, way: str = "tcp", **options: Any) -> openai.AsyncOpenAI:
        # The HTTP library that the client was built on: newer releases have moved to the successor.
        http: Any = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
        transport = http.AsyncHTTPTransport(uds=self.uds) if way == "uds" else None
        client = http.AsyncClient(transport=transport, timeout=10, trust_env=False)
        options = {"api_key": "none", "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.base}/v1", http_client=client, **options)


def looping(tokenizer: Tokenizer, text: str = TEXT) -> Script:
    """A script that says `text` again and again."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tolist()
    return lambda admit, prompt: itertools.cycle(tokens)


def saying(tokenizer: Tokenizer, text: str) -> Script:
    """A script that says `text` once and then its end token."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tolist()
    return lambda admit, prompt: itertools.chain(tokens, itertools.repeat(min(tokenizer.eos_ids)))


@asynccontextmanager
async def serving(
    directory: Path,
    run_dir: Path,
    *,
    script: Script | None = None,
    tuning: Tuning | None = None,
    ready: bool = True,
    send_buffer: int | None = None,
    context: dict[str, Any] | None = None,
    salt: bytes = SALT,
    **deployment: Any,
) -> AsyncIterator[Gateway]:
    """Start a gateway on a free port and a Unix socket in `run_dir`; stop it at the end.

    `send_buffer` is what the kernel holds of each answer: small, a reader that does not read is noticed soon.
    """
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    path = str(run_dir / "m.sock")
    uds = socket.socket(socket.AF_UNIX)
    uds.bind(path)
    uds.listen()
    keys = deployment.pop("api_keys", ())
    settings = Deployment(listen=Listen(api_keys=keys), **deployment)
    config = GatewayConfig(
        deployment=settings,
        model_name=MODEL,
        model_directory=str(directory),
        ranks=(RANK,),
        daemon_pid=1,
        uds_path=path,
        tcp_port=port,
        created=1,
        prefix_salt=salt,
    )
    if send_buffer is not None:
        for listening in (tcp, uds):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    fds = {"tcp": tcp.detach(), "uds": uds.detach()}
    ctx = FakeContext(msgspec.msgpack.encode(config), fds, **(context or {}))
    actor = GatewayActor(ctx, tuning)  # type: ignore[arg-type]
    await actor.setup()
    rank = FakeRank(ctx, actor, script or looping(actor.service.intake.tokenizer))  # type: ignore[arg-type]
    gateway = Gateway(actor, ctx, rank, port, path)
    ranking = asyncio.create_task(rank.run())
    gateway.run = asyncio.create_task(actor.run())
    if ready:
        actor.service.ready(RANK)
    try:
        yield gateway
    finally:
        ctx.hastened = True
        ctx.stop()
        await gateway.run
        await actor.teardown()
        ranking.cancel()
        await asyncio.gather(ranking, return_exceptions=True)
        ctx.close()
