"""OpenAI's own Python client against the gateway, over TCP and over the Unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from mstar.model.tokenizer import Tokenizer
from tests.gateway.harness import MODEL, TEXT, Gateway, saying, serving
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.waiting import wait_until_async

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


@pytest.mark.behaviour("F-26")
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
async def test_a_budget_of_k_gives_k_tokens(gateway: Gateway, k: int) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=k)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=k, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == k
    assert answer.choices[0].finish_reason == "length"
    assert chunks[-1].usage == answer.usage


@pytest.mark.behaviour("F-25")
@pytest.mark.parametrize("stop", ["of the", " world", ["never", "hello of"], "e hello"])
async def test_a_stop_string_ends_the_answer_before_it(gateway: Gateway, way: str, stop: Any) -> None:
    async with gateway.openai(way) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=30, stop=stop)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=30, stop=stop, stream=True
        )
        streamed = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    stops = [stop] if isinstance(stop, str) else stop
    expected = TEXT[: min(TEXT.find(one) for one in stops if one in TEXT)]
    assert answer.choices[0].message.content == streamed == expected
    assert answer.choices[0].finish_reason == "stop"
    await wait_until_async(lambda: len(gateway.rank.aborted) == 2, what="both rows to be dropped")


async def test_the_end_token_is_hidden_and_counted(
    tiny_model_dir: Path, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    async with serving(tiny_model_dir, tmp_path, script=saying(tiny_tokenizer, "hello")) as gateway:
        async with gateway.openai() as client:
            answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=30)
            ignoring = await client.completions.create(
                model=MODEL, prompt="x", max_tokens=9, extra_body={"ignore_eos": True}
            )
    tokens = len(tiny_tokenizer.encode("hello", add_special_tokens=False))
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens + 1
    assert (ignoring.choices[0].text, ignoring.choices[0].finish_reason) == ("hello", "length")
    assert gateway.rank.admitted[1].stop_ids == ()


async def test_n_choices_come_with_their_index_and_their_own_draw(gateway: Gateway, way: str) -> None:
    async with gateway.openai(way) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, n=3, seed=5)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=3, n=3, seed=5, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    drawn = [(admit.sampling.seed, admit.sampling.choice) for admit in gateway.rank.admitted]
    assert drawn == [(5, 0), (5, 1), (5, 2)] * 2
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert [one.finish_reason for one in mine if one.finish_reason] == ["length"]
        assert "".join(one.delta.content or "" for one in mine) == answer.choices[0].message.content


async def test_several_prompts_are_answered_in_order(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt=[[3, 4, 5], [6]], max_tokens=2, n=2)
    prompts = [prompt.tolist() for prompt in gateway.rank.prompts.values()]
    assert prompts == [[3, 4, 5], [3, 4, 5], [6], [6]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


async def test_logprobs_of_a_chat(gateway: Gateway, tiny_tokenizer: Tokenizer) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert (
        b"".join(bytes(entry.bytes or []) for entry in content).decode() == answer.choices[0].message.content
    )
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-0.5, -1.5]] * 3
    assert content[0].top_logprobs[0].token == content[0].token
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in content]


async def test_logprobs_of_a_completion(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=2)
        none = await client.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.token_logprobs == [-0.5] * 3
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [0, lengths[0], lengths[0] + lengths[1]]
    assert found.top_logprobs is not None
    assert [len(top) for top in found.top_logprobs] == [2, 2, 2]
    assert none.choices[0].logprobs is not None
    assert [list(top) for top in none.choices[0].logprobs.top_logprobs or []] == [[t] for t in found.tokens]


async def test_errors_are_the_librarys_own_classes(gateway: Gateway, way: str) -> None:
    async with gateway.openai(way) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt=[5] * 600)
    assert bad.value.param == "temperature"
    assert "from 0 to 2, not 3" in bad.value.message
    assert unknown.value.code == "model_not_found"
    assert MODEL in unknown.value.message
    assert long.value.code == "context_length_exceeded"
    assert "600" in long.value.message
    assert "512" in long.value.message
    assert gateway.rank.admitted == []


@pytest.mark.behaviour("F-17")
async def test_closing_a_stream_drops_its_row(gateway: Gateway, way: str) -> None:
    gateway.rank.credit = 3
    async with gateway.openai(way) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await wait_until_async(lambda: gateway.rank.aborted, what="the row to be dropped")
    assert gateway.service.statistics().book.outcomes == {"cancelled": 1}


async def test_the_models_are_listed_by_every_served_name(
    tiny_model_dir: Path, tmp_path: Path, way: str
) -> None:
    async with serving(tiny_model_dir, tmp_path, served_model_name=("a", "org/b")) as gateway:
        async with gateway.openai(way) as client:
            models = [model async for model in client.models.list()]
            one = await client.models.retrieve("org/b")
            answer = await client.completions.create(model="org/b", prompt="x", max_tokens=1)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("c")
    assert [model.id for model in models] == ["a", "org/b"]
    assert one.object == "model"
    assert answer.model == "org/b"


async def test_sampling_comes_from_the_request_then_the_models_file_then_openai(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", generation={"temperature": 0.25, "top_k": 7})
    async with serving(directory, tmp_path) as gateway, gateway.openai() as client:
        await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        await client.completions.create(model=MODEL, prompt="x", max_tokens=1, temperature=1.5, top_p=0.5)
        first, second = [admit.sampling for admit in gateway.rank.admitted]
    assert (first.temperature, first.top_k, first.top_p) == (0.25, 7, 1.0)
    assert (second.temperature, second.top_k, second.top_p) == (1.5, 7, 0.5)
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**63


@pytest.mark.behaviour("F-21")
async def test_a_hundred_requests_of_one_client_id_are_a_hundred_requests(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        answers = await asyncio.gather(
            *[
                client.completions.with_raw_response.create(
                    model=MODEL, prompt=[5 + n], max_tokens=2, extra_headers={"x-request-id": "mine"}
                )
                for n in range(100)
            ]
        )
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
    assert len({answer.parse().id for answer in answers}) == 100
    assert len({admit.request for admit in gateway.rank.admitted}) == 100
    assert sorted(prompt[0] for prompt in gateway.rank.prompts.values()) == list(range(5, 105))
