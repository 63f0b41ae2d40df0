"""Questions to the composition root are bounded, and their failures are the asker's."""

from __future__ import annotations

import asyncio

from actors.answers import Answers
from actors.frames import Answer, Ask
from actors.handover import MAX_FRAME
from tests.helpers import wait_until_async


async def test_answers_come_back_by_number_and_errors_as_text() -> None:
    async def answer(actor: str, kind: str, payload: bytes) -> bytes:
        if kind == "bad":
            raise LookupError(f"{actor} is wrong")
        return payload[::-1]

    got: list[Answer] = []
    answers = Answers(answer)
    answers.put("a", Ask(1, "good", b"xy"), got.append)
    answers.put("a", Ask(2, "bad", b""), got.append)
    await wait_until_async(lambda: len(got) == 2)
    assert got == [Answer(1, b"yx", ""), Answer(2, b"", "LookupError: a is wrong")]


async def test_open_questions_are_bounded_per_actor() -> None:
    release = asyncio.Event()

    async def answer(actor: str, kind: str, payload: bytes) -> bytes:
        await release.wait()
        return b""

    got: list[Answer] = []
    answers = Answers(answer)
    for number in range(65):
        answers.put("a", Ask(number, "k", b""), got.append)
    answers.put("b", Ask(100, "k", b""), got.append)
    assert got == [Answer(64, b"", "more than 64 questions of 'a' are open")]
    release.set()
    await wait_until_async(lambda: len(got) == 66)
    answers.put("a", Ask(200, "k", b""), got.append)
    await wait_until_async(lambda: got[-1] == Answer(200, b"", ""))


async def test_an_answer_that_fits_no_frame_is_an_error_with_its_size() -> None:
    async def answer(actor: str, kind: str, payload: bytes) -> bytes:
        return bytes(MAX_FRAME)

    got: list[Answer] = []
    Answers(answer).put("a", Ask(1, "status", b""), got.append)
    await wait_until_async(lambda: got)
    assert (
        got[0].error
        == f"the answer to 'status' has {MAX_FRAME} bytes; at most {MAX_FRAME - 1024} fit a frame"
    )


async def test_closing_drops_what_is_open() -> None:
    async def answer(actor: str, kind: str, payload: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    got: list[Answer] = []
    answers = Answers(answer)
    answers.put("a", Ask(1, "k", b""), got.append)
    await asyncio.sleep(0)
    answers.close()
    await wait_until_async(lambda: not answers._tasks)
    assert got == []
