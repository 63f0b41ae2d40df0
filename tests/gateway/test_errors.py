"""Errors over HTTP: OpenAI's shape, the status, what is allowed, and nobody else disturbed."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar.gateway.tuning import Tuning
from tests.gateway.harness import MODEL, Gateway, serving
from tests.gateway.raw import RawClient, http_post
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.waiting import wait_until_async

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def checked(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"].startswith("application/json")
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    return error


@pytest.mark.behaviour("F-24", "F-28")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"logit_bias": {"5": 1, "100000": 1}}, 400, "logit_bias[100000]"),
        ({"model": "other"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"nonsense": 1}, 400, "nonsense"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "messages"),
        ({"max_tokens": 511}, 400, "max_tokens"),
        ({"min_tokens": 505}, 400, "min_tokens"),
    ],
)
async def test_a_bad_field_is_a_status_and_a_json_error_even_for_a_stream(
    gateway: Gateway, stream: bool, change: dict[str, Any], status: int, param: str
) -> None:
    async with gateway.http() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream, **change})
        error = checked(response)
        assert (response.status_code, error["param"]) == (status, param)
        assert (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})).status_code == 200
    assert gateway.service.statistics().refused == {status: 1}


@pytest.mark.behaviour("F-24")
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_a_400(
    tmp_path: Path, path: str
) -> None:
    model = write_tiny_model(tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    pad = {**tokenizer["added_tokens"][0], "id": 1000, "content": "<pad>"}
    (model / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], pad]})
    )
    body = {"model": MODEL, "prompt": "a <pad>", "messages": [{"role": "user", "content": "a <pad>"}]}
    del body["messages" if path == "completions" else "prompt"]
    async with serving(model, tmp_path) as gateway, gateway.http() as client:
        response = await client.post(f"/v1/{path}", json=body)
        assert gateway.rank.admitted == []
    assert response.status_code == 400
    assert "which the tokenizer has and the model has not" in checked(response)["message"]


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "context", "loop", "a b", ""])
async def test_a_variable_of_the_template_may_have_any_name(gateway: Gateway, name: str) -> None:
    async with gateway.http() as client:
        body = {**CHAT, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": NaN}', b"\xff", b'{"a":' * 5000])
async def test_a_body_that_is_no_json_object_is_400(gateway: Gateway, body: bytes) -> None:
    async with gateway.http() as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            response = await client.post(path, content=body)
            assert response.status_code == 400
            assert checked(response)["code"] == "invalid_json"


async def test_routes_and_methods_that_do_not_exist(gateway: Gateway) -> None:
    async with gateway.http() as client:
        missing = await client.get("/v1/nothing")
        wrong = await client.get("/v1/chat/completions")
    assert (missing.status_code, checked(missing)["code"]) == (404, "unknown_url")
    assert (wrong.status_code, checked(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_413(tiny_model_dir: Path, tmp_path: Path, declared: bool) -> None:
    async with serving(tiny_model_dir, tmp_path, max_body_bytes=1000) as gateway, gateway.http() as client:

        async def parts() -> Any:
            for _ in range(3):
                yield b" " * 500

        fits = await client.post("/v1/completions", content=b" " * 1000)
        response = await client.post("/v1/completions", content=b" " * 1001 if declared else parts())
        assert fits.status_code == 400
        assert response.status_code == 413
        assert "1000" in checked(response)["message"]


async def test_an_api_key_is_needed_where_keys_are_set(tiny_model_dir: Path, tmp_path: Path) -> None:
    keys = ("first", "s\u00e9cond")
    async with serving(tiny_model_dir, tmp_path, api_keys=keys) as gateway, gateway.http() as client:
        for headers in (
            {},
            {"Authorization": "Bearer no"},
            {"Authorization": "first"},
            {"Authorization": "Basic first"},
        ):
            for path in ("/v1/models", "/status", "/v1/nothing"):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"].startswith("Bearer")
                assert checked(response)["code"] == "invalid_api_key"
        for key in keys:
            bearer = [(b"Authorization", f"Bearer {key}".encode())]
            assert (await client.get("/v1/models", headers=bearer)).status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_a_body_that_does_not_come_is_408_and_gives_its_place_back(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tuning = Tuning(body_seconds=0.05)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning) as gateway:
        client = await RawClient.connect(gateway.port)
        await client.send(http_post("/v1/completions", b"x" * 100)[:-50])
        assert b" 408 " in await client.until(b"}}")
        client.close()
        await wait_until_async(lambda: gateway.service.conductor.live == 0)


async def test_a_body_whose_encoding_is_broken_is_400(gateway: Gateway) -> None:
    async with gateway.http() as client:
        response = await client.post(
            "/v1/completions", content=b"no gzip at all", headers={"content-encoding": "gzip"}
        )
        assert (response.status_code, checked(response)["code"]) == (400, "invalid_body")
        assert (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})).status_code == 200
    await wait_until_async(lambda: gateway.service.conductor.live == 0)


async def test_malformed_http_is_a_400_and_no_traceback_in_the_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    client = await RawClient.connect(gateway.port)
    await client.send(b"GET /health HTTP/1.1\r\nX: a\x00b\r\n\r\n")
    assert b" 400 " in await client.until(b"\r\n\r\n")
    client.close()
    assert [record for record in caplog.records if record.name == "aiohttp.server"] == []


async def test_as_many_connections_are_accepted_as_the_hard_limit_allows(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        async with serving(tiny_model_dir, tmp_path):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_strange_request_id_is_not_echoed(gateway: Gateway) -> None:
    async with gateway.http() as client:
        mine = await client.get("/v1/models", headers={"x-request-id": "a b"})
        strange = await client.get("/v1/models", headers={b"x-request-id": b"\xff\xfe"})
        long = await client.get("/v1/models", headers={"x-request-id": "a" * 300})
    assert mine.headers["x-request-id"] == "a b"
    assert strange.headers["x-request-id"].startswith("req_")
    assert long.headers["x-request-id"].startswith("req_")


async def test_an_unexpected_error_is_a_500_without_its_details(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(gateway.service.intake, "recipe", broken)
    async with gateway.http() as client:
        response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "ZeroDivisionError: secret" in caplog.text
    assert gateway.service.conductor.live == 0


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
FUZZED = [
    "messages",
    "n",
    "stop",
    "logit_bias",
    "max_tokens",
    "stop_token_ids",
    "top_k",
    "seed",
    "chat_template_kwargs",
]


@pytest.mark.behaviour("F-24")
async def test_fuzzed_bodies_are_answered_and_disturb_nobody(gateway: Gateway) -> None:
    bodies: list[bytes] = []

    @settings(max_examples=80, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=40), st.dictionaries(st.sampled_from(FUZZED), anything, max_size=3)))
    def collect(body: Any) -> None:
        bodies.append(
            body if isinstance(body, bytes) else json.dumps({**CHAT, "max_tokens": 1, **body}).encode()
        )

    collect()
    async with gateway.openai() as other, gateway.http() as client:
        victim = await other.chat.completions.create(**CHAT, stream=True, max_tokens=300, seed=1)  # type: ignore[call-overload]
        statuses = await asyncio.gather(*[status(client, body) for body in bodies])
        chunks = [chunk async for chunk in victim]
    assert set(statuses) <= {200, 400, 404}
    assert statuses.count(400) > 10
    assert chunks[-1].choices[0].finish_reason == "length"
    assert gateway.service.book.live == 0


async def status(client: httpx.AsyncClient, body: bytes) -> int:
    return (await client.post("/v1/chat/completions", content=body)).status_code
