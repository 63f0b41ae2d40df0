"""The other process: attaches, answers until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import sys

import msgspec

from tools.bench.ipc.channels import Endpoint, open_channel
from tools.bench.ipc.tasks import answer_messages, answer_steps

__all__ = ["loop_factory"]


def loop_factory(name: str) -> asyncio.AbstractEventLoop:
    """A new event loop, "uvloop" or "asyncio"."""
    if name == "uvloop":
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop
    return asyncio.SelectorEventLoop()


async def _answer(endpoint: Endpoint) -> None:
    channel = await open_channel(endpoint)
    gc.collect()
    gc.freeze()
    gc.disable()
    print("ready", flush=True)
    await (answer_steps if endpoint.task == "steps" else answer_messages)(channel)
    channel.close()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1].encode(), type=Endpoint)
    with asyncio.Runner(loop_factory=lambda: loop_factory(given.loop)) as runner:
        runner.run(_answer(given))
