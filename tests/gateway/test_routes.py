"""The routes beside generation: tokenize, detokenize, status and metrics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar.model.tokenizer import Tokenizer
from tests.gateway.harness import MODEL, Gateway, serving
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.waiting import wait_until_async

HELLO = [{"role": "user", "content": "hello"}]


async def test_tokenizing_a_prompt_and_back(gateway: Gateway, tiny_tokenizer: Tokenizer) -> None:
    async with gateway.http() as client:
        found = (await client.post("/tokenize", json={"model": MODEL, "prompt": "hello caf\u00e9"})).json()
        back = (await client.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]})).json()
        empty = (await client.post("/detokenize", json={"tokens": []})).json()
    assert found["tokens"] == tiny_tokenizer.encode("hello caf\u00e9", add_special_tokens=True).tolist()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    assert back == {"prompt": "hello caf\u00e9"}
    assert empty == {"prompt": ""}


@pytest.mark.parametrize("generate", [None, True, False])
async def test_tokenizing_messages_renders_the_template(
    gateway: Gateway, tiny_tokenizer: Tokenizer, generate: bool | None
) -> None:
    async with gateway.http() as client:
        body = {"messages": HELLO, "add_generation_prompt": generate}
        found = (await client.post("/tokenize", json=body)).json()
    text = "<|im_start|>user\nhello<|im_end|>\n" + ("" if generate is False else "<|im_start|>assistant\n")
    assert tiny_tokenizer.decode(found["tokens"], skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": 1}, "model"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "max_tokens": 3}, "max_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, 5000]}, "tokens[1]"),
        ("/detokenize", {"tokens": [[1], [2]]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": ["x"]}, "model"),
    ],
)
async def test_bad_bodies_of_both_are_400_by_name(gateway: Gateway, path: str, body: Any, param: str) -> None:
    async with gateway.http() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_model_without_a_template_refuses_chats_alone(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text().replace("chat_template", "no_template"))
    async with serving(directory, tmp_path) as gateway, gateway.http() as client:
        chat = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
        plain = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
    assert chat.status_code == 400
    assert "chat template" in chat.json()["error"]["message"]
    assert plain.status_code == 200


async def test_the_status_holds_the_daemon_and_what_the_gateway_counts(gateway: Gateway) -> None:
    gateway.rank.report(step=7, running=2, pages_total=10, pages_free=3)
    async with gateway.http() as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
        found = (await client.get("/status")).json()
    assert found["daemon"] == {"pid": 1, "actors": [{"name": "rank/0", "state": "running"}]}
    assert found["actors"] == [{"name": "rank/0", "state": "running"}]
    assert found["requests"]["outcomes"] == {"done": 1}
    assert found["ranks"]["rank/0"]["step"] == 7
    assert found["uds"] == gateway.uds
    assert found["port"] == gateway.port
    assert {"admit/0", "tokens/0", "prompts/0"} <= set(found["rings"])


@pytest.mark.parametrize("answer", [None, b"no json"])
async def test_a_supervisor_that_does_not_answer_hides_nothing_else(
    gateway: Gateway, answer: bytes | None
) -> None:
    gateway.ctx.answer = answer
    async with gateway.http() as client:
        found = (await client.get("/status")).json()
    assert found["daemon"]["error"]
    assert found["requests"]["live"] == 0


async def metrics(gateway: Gateway) -> dict[str, float]:
    async with gateway.http() as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def test_the_metrics_count_requests_tokens_and_times(gateway: Gateway) -> None:
    gateway.rank.report(
        step=7, running=2, pages_total=10, pages_free=3, pages_cached=5, refused=1, preempted=2, evicted=4
    )
    async with gateway.http() as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"model": MODEL, "prompt": [5, 6], "max_tokens": 3})
        await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": 0})
    found = await metrics(gateway)
    assert found["mstar_requests_total{outcome=done}"] == 2
    assert found["mstar_requests_refused_total{status=400}"] == 1
    assert found["mstar_choices_total{reason=length}"] == 2
    assert found["mstar_prompt_tokens_total"] == 4
    assert found["mstar_generated_tokens_total"] == 6
    assert found["mstar_rows_total"] == 6
    assert found["mstar_requests_live"] == 0
    assert found["mstar_ready"] == 1
    assert found["mstar_lost_wakeups_total"] == 0
    assert found["mstar_ring_full_total{ring=admit/0}"] == 0
    assert found["mstar_time_to_first_token_seconds_count"] == 2
    assert found["mstar_inter_token_seconds_count"] == 4
    assert found["mstar_request_seconds_count"] == 2
    assert found["mstar_time_to_first_token_seconds_bucket{le=+Inf}"] == 2
    assert found["mstar_rank_step_total{rank=rank/0}"] == 7
    assert found["mstar_rank_pages_free{rank=rank/0}"] == 3
    assert found["mstar_rank_pages_cached{rank=rank/0}"] == 5
    assert found["mstar_rank_refused_total{rank=rank/0}"] == 1
    assert found["mstar_rank_preempted_total{rank=rank/0}"] == 2
    assert found["mstar_rank_evicted_total{rank=rank/0}"] == 4
    assert found["mstar_rank_cached_tokens_total{rank=rank/0}"] == 0
    assert found["mstar_prompts_unshared_total{rank=rank/0}"] == 0


@pytest.mark.behaviour("F-01")
async def test_the_metrics_show_a_rank_that_hangs_with_its_step_its_stage_and_how_long(
    gateway: Gateway,
) -> None:
    line = gateway.ctx.lines["rank/0"]
    line.stage_name, line.step, line.beat = "running", 812, time.monotonic_ns() - 40_000_000_000
    found = await metrics(gateway)
    assert found["mstar_actor_step{actor=rank/0}"] == 812
    assert 40 <= found["mstar_actor_beat_age_seconds{actor=rank/0,stage=running}"] < 100


async def test_stale_and_malformed_records_are_counted_and_hurt_nobody(gateway: Gateway) -> None:
    from tests.gateway.fake_rank import batch

    gateway.rank.send(batch([12345], [0], [5], [0]))
    assert gateway.ctx.rank_outbox.send(b"\x01\0\0\0\0\0\0\0garbage")
    assert gateway.ctx.rank_outbox.send(b"\x03\0\0\0\0\0\0\0garbage")
    assert gateway.ctx.rank_outbox.send(b"\x77")
    await wait_until_async(lambda: gateway.service.statistics().malformed == 3)
    found = await metrics(gateway)
    assert found["mstar_stale_rows_total"] == 1
    assert found["mstar_malformed_records_total"] == 3
    async with gateway.http() as client:
        assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).status_code == 200
