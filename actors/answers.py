"""Questions that actors put to the composition root, answered without holding up the supervisor."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from actors.frames import Answer, Ask
from actors.handover import MAX_FRAME

__all__ = ["Answers"]

_MAX_OPEN = 64  # questions of one actor
_MAX_ANSWER = MAX_FRAME - 1024
_MAX_ERROR = 4096


class Answers:
    """At most 64 open questions per actor; what `answer` raises becomes the asker's error."""

    def __init__(self, answer: Callable[[str, str, bytes], Awaitable[bytes]]) -> None:
        self._answer = answer
        self._open: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, actor: str, question: Ask, reply: Callable[[Answer], None]) -> None:
        """Have a question answered; `reply` is called once, from the loop."""
        if self._open[actor] >= _MAX_OPEN:
            reply(Answer(question.id, b"", f"more than {_MAX_OPEN} questions of {actor!r} are open"))
            return
        self._open[actor] += 1
        task = asyncio.get_running_loop().create_task(self._work(actor, question, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Drop the open questions."""
        for task in self._tasks:
            task.cancel()

    async def _work(self, actor: str, question: Ask, reply: Callable[[Answer], None]) -> None:
        payload, error = b"", ""
        try:
            payload = await self._answer(actor, question.kind, question.payload)
        except Exception as raised:  # noqa: BLE001 - the asker learns of it, and the supervisor goes on
            error = f"{type(raised).__name__}: {raised}"[:_MAX_ERROR]
        finally:
            self._open[actor] -= 1
        if len(payload) > _MAX_ANSWER:
            error = (
                f"the answer to {question.kind!r} has {len(payload)} bytes; at most {_MAX_ANSWER} fit a frame"
            )
            payload = b""
        reply(Answer(question.id, payload, error))
