"""An OpenAI-compatible server that follows a script on a clock of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.test_utils import TestServer

__all__ = ["Clock", "FakeServer"]


class Clock:
    """Time that stands still unless told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeServer:
    """Answers request k with ``script(k, body)``: pairs of (seconds to wait before it, event or text).

    A dict is sent as one event; text is sent as it is. A script that begins with an int answers with that
    status instead. ``running`` and ``most`` count requests in flight.
    """

    def __init__(self, script: Callable[[int, dict], Sequence], clock: Clock) -> None:
        self._script = script
        self._clock = clock
        self._read = asyncio.Event()
        self.bodies: list[dict] = []
        self.running = 0
        self.most = 0
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        self.server = TestServer(app)

    async def __aenter__(self) -> FakeServer:
        await self.server.start_server()
        self.url = str(self.server.make_url("")).rstrip("/")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def was_read(self) -> None:
        """The client has booked the last text event: the script may go on."""
        self._read.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._play(request, self._script(len(self.bodies) - 1, body))
        finally:
            self.running -= 1

    async def _play(self, request: web.Request, script: Sequence) -> web.StreamResponse:
        if isinstance(script[0], int):
            return web.json_response({"error": {"message": script[1]}}, status=script[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for wait, event in script:
            self._clock.now += wait
            self._read.clear()
            piece = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            await response.write(piece.encode())
            if wait:
                await self._read.wait()
        return response


def text(word: str, **more: object) -> dict:
    """One event of a completion."""
    return {"choices": [{"index": 0, "text": word}], **more}


def usage(prompt: int, output: int) -> dict:
    """The usage event at the end of a stream."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


DONE = "data: [DONE]\n\n"
