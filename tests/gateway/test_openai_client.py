"""OpenAI's own Python client against the gateway, over TCP and over the Unix socket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.harness import MODEL, TEXT, Gateway

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=["tcp", "uds"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_chat_is_answered(gateway: Gateway, way: str) -> None:
    async with gateway.openai(way) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    tokenizer = gateway.service.intake.tokenizer
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)[:8].tolist()
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


async def test_a_chat_is_streamed(gateway: Gateway, way: str) -> None:
    async with gateway.openai(way) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_a_completion_is_answered_and_streamed(gateway: Gateway, way: str) -> None:
    async with gateway.openai(way) as client:
        whole = await client.completions.create(model=MODEL, prompt="hello", max_tokens=5)
        stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert whole.choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
