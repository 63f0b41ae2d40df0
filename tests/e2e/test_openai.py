"""The openai client against a running daemon, over TCP and over the Unix socket."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.server import Server
from tests.helpers.waiting import wait_until

# The first test waits for the server of the module.
pytestmark = pytest.mark.timeout(60)

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=["tcp", "uds"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[openai.OpenAI]:
    transport = httpx.HTTPTransport(uds=str(server.socket)) if request.param == "uds" else None
    base = "http://localhost/v1" if request.param == "uds" else f"{server.url}/v1"
    with httpx.Client(transport=transport) as http:
        with openai.OpenAI(
            base_url=base, api_key="none", http_client=http, max_retries=0, timeout=60
        ) as found:
            yield found


@pytest.fixture
def name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.object, model.id) == ("model", "tiny")
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_chat_has_a_message_a_reason_and_usage(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_stream_adds_up_to_the_whole_answer_and_ends_with_usage(client: openai.OpenAI, name: str) -> None:
    common = {"model": name, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**common)
    chunks = list(
        client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []


def test_without_being_asked_no_usage_chunk_comes(client: openai.OpenAI, name: str) -> None:
    chunks = list(client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_completions_continue_text_and_token_ids(client: openai.OpenAI, name: str) -> None:
    text = client.completions.create(
        model=name, prompt="the", max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert text.usage is not None
    assert text.usage.completion_tokens == 4
    streamed = client.completions.create(
        model=name, prompt="the", max_tokens=4, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_n_choices_come_with_their_indices_and_a_common_usage(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=name, messages=MESSAGES, n=3, max_tokens=4, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_the_most_choices_of_a_long_prompt_are_answered(
    client: openai.OpenAI, name: str, server: Server
) -> None:
    answer = client.completions.create(
        model=name, prompt=[5] * 1100, n=128, max_tokens=1, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == list(range(128))
    with server.client() as native:
        slab = native.status()["rings"]["prompts/0"]
    assert slab["leased"] == 0


def test_a_seed_makes_an_answer_repeatable(client: openai.OpenAI, name: str) -> None:
    def text(seed: int) -> str | None:
        answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=12, seed=seed)
        return answer.choices[0].message.content

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI, name: str) -> None:
    common = {
        "model": name,
        "prompt": "the",
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**common).choices[0].text
    stop = whole[10:13]
    cut = client.completions.create(**common, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]


def test_logprobs_come_with_their_alternatives(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=name,
        messages=MESSAGES,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
        extra_body={"ignore_eos": True},
    )
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert len(scores.content) == 3
    for entry in scores.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


@pytest.mark.behaviour("F-27")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"top_k": 0}}, "top_k"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_is_not_honoured_is_a_400_that_names_it(
    client: openai.OpenAI, name: str, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=name, messages=MESSAGES, **fields)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert param in caught.value.message


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # type: ignore[arg-type]


@pytest.mark.behaviour("F-19")
def test_a_prompt_over_the_window_is_a_400_with_the_figures(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model=name, prompt=[5] * 9000)


@pytest.mark.behaviour("F-17")
def test_closing_a_stream_frees_its_row(client: openai.OpenAI, name: str, server: Server) -> None:
    stream = client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    with server.client() as native:

        def idle() -> bool:
            status = native.status()
            rank = status["ranks"].get("rank/0", {})
            return (
                status["requests"]["live"] == 0
                and rank.get("running") == 0
                and rank["pages_free"] + rank["pages_cached"] == rank["pages_total"]
            )

        wait_until(idle, 10, what="the row and its pages to be free", excuse=(KeyError,))


async def test_requests_at_once_are_all_answered(server: Server) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="tiny", prompt="the", max_tokens=k, extra_body={"ignore_eos": True}
                )
                for k in range(1, 17)
            )
        )
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == list(range(1, 17))
