from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.bench.fake_server import DONE, Clock, FakeServer, text, usage
from tools.bench.serving.client import Client, Target
from tools.bench.serving.figures import summarise
from tools.bench.serving.load import run_burst, run_closed, run_open
from tools.bench.serving.workload import Job, named, prompt_text, prompt_tokens, schedule

JOB = Job("g", 5, 3, seed=1)


async def send(script: list, job: Job = JOB, **target):
    clock = Clock()
    async with FakeServer(lambda number, body: script, clock) as fake:
        async with Client(Target(fake.url, "m", **target), clock=clock) as client:
            return await client.send(job, clock(), fake.was_read), fake.bodies[0]


async def test_the_times_are_those_of_the_script():
    script = [
        (0.0, ": ping\n\n"),
        (0.5, text("a")),
        (0.25, text("b")),
        (2.0, text("c")),
        (0.0, usage(5, 3)),
        (0, DONE),
    ]
    exchange, _ = await send(script)
    assert exchange.error == ""
    assert exchange.ttft == 0.5
    assert exchange.gaps == [0.25, 2.0]
    assert (exchange.prompt_tokens, exchange.output_tokens, exchange.status) == (5, 3, 200)


async def test_an_event_without_text_is_no_token():
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    word = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    exchange, body = await send([(0, role), (1.0, word), (0, last), (0, DONE)], endpoint="chat")
    assert exchange.events == [101.0]
    assert body["messages"][0]["role"] == "user"
    assert "prompt" not in body


async def test_tokens_of_an_event_are_booked_where_the_server_tells_them():
    script = [(1.0, text("a", **usage(5, 1))), (1.0, text("bcd", **usage(5, 4))), (0, DONE)]
    script = [
        (wait, {**event, "choices": [{"text": "x"}]} if isinstance(event, dict) else event)
        for wait, event in script
    ]
    exchange, _ = await send(script)
    assert exchange.sizes == [1, 3]


async def test_an_event_split_over_packets_is_one_event():
    whole = f"data: {text_json()}\n\n"
    exchange, _ = await send([(0, whole[:9]), (0, whole[9:20]), (1.0, whole[20:]), (0, DONE)])
    assert len(exchange.events) == 1


def text_json() -> str:
    return '{"choices": [{"index": 0, "text": "a"}]}'


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([503, "busy"], "503: "),
        ([(0, {"error": {"message": "lost"}}), (0, DONE)], "event: "),
        ([(1.0, text("a"))], "without [DONE]"),
        ([(0, "data: {broken\n\n")], "DecodeError"),
    ],
)
async def test_what_goes_wrong_is_told_and_never_raised(script, error):
    exchange, _ = await send(script)
    assert error in exchange.error


async def test_a_server_that_is_not_there_is_an_error_of_its_requests():
    async with Client(Target("http://127.0.0.1:9", "m"), clock=Clock()) as client:
        assert (await client.send(JOB, 0.0)).error.startswith("ClientConnectorError")


async def test_the_body_is_greedy_streamed_and_of_the_exact_length():
    _, body = await send([(0, DONE)])
    assert len(body["prompt"]) == 5
    assert (body["temperature"], body["max_tokens"], body["ignore_eos"]) == (0, 3, True)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_a_connection_is_kept_unless_the_server_cannot_be_trusted_with_it(keep_alive):
    clock = Clock()
    closing: list[str] = []

    class Noting(FakeServer):
        async def _play(self, request, script):
            closing.append(request.headers.get("Connection", "keep-alive"))
            return await super()._play(request, script)

    async with Noting(lambda number, body: [(0, DONE)], clock) as fake:
        async with Client(Target(fake.url, "m", keep_alive=keep_alive), clock=clock) as client:
            for _ in range(2):
                assert (await client.send(JOB, 0.0)).error == ""
    assert closing == ["keep-alive" if keep_alive else "close"] * 2


async def test_a_closed_loop_keeps_its_concurrency_and_sends_every_job():
    clock = Clock()
    release = asyncio.Event()

    class Waiting(FakeServer):
        async def _play(self, request, script):
            if len(self.bodies) >= 3:
                release.set()
            await release.wait()
            return await super()._play(request, script)

    async with Waiting(lambda number, body: [(0, text("a")), (0, usage(5, 1)), (0, DONE)], clock) as fake:
        async with Client(Target(fake.url, "m"), clock=clock) as client:
            exchanges = await run_closed(client, [JOB] * 10, 3, clock)
    assert fake.most == 3
    assert summarise(exchanges).output_tokens == 10


async def test_an_open_loop_sends_at_the_arrivals_whatever_became_of_the_former():
    clock = Clock()
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    jobs = [Job("g", 2, 1, arrival) for arrival in (0.0, 1.5, 1.5, 4.0)]
    async with FakeServer(lambda number, body: [(0, text("a")), (0, DONE)], clock) as fake:
        async with Client(Target(fake.url, "m"), clock=clock) as client:
            exchanges = await run_open(client, jobs, clock, sleep)
    assert slept == [0.0, 1.5, 0.0, 2.5]
    assert [exchange.due for exchange in exchanges] == [100.0, 101.5, 101.5, 104.0]


async def test_a_burst_waits_until_every_stream_decodes():
    clock = Clock()
    burst_sent = asyncio.Event()

    class Watching(FakeServer):
        async def _play(self, request, script):
            body = self.bodies[-1]
            if len(body["prompt"]) == 9:
                burst_sent.set()
                return await super()._play(request, script)
            response = await super()._play(request, script[:1])
            await burst_sent.wait()  # a stream that was decoding ends only after the burst came
            await response.write(DONE.encode())
            return response

    async with Watching(lambda number, body: [(0, text("a")), (0, DONE)], clock) as fake:
        async with Client(Target(fake.url, "m"), clock=clock) as client:
            exchanges = await run_burst(client, [JOB] * 3, [Job("burst", 9, 1)], clock)
    assert [exchange.error for exchange in exchanges] == [""] * 4
    assert [exchange.group for exchange in exchanges] == ["g", "g", "g", "burst"]


async def test_requests_go_over_a_unix_socket(tmp_path):
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=DONE, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    path = str(tmp_path / "s")
    await web.UnixSite(runner, path).start()
    try:
        async with Client(Target("http://localhost", "m", uds=path), clock=Clock()) as client:
            assert (await client.send(JOB, 0.0)).error == ""
    finally:
        await runner.cleanup()


def test_a_schedule_follows_from_its_seed():
    assert schedule(named("rate-5"), 3) == schedule(named("rate-5"), 3)
    assert schedule(named("rate-5"), 3) != schedule(named("rate-5"), 4)


def test_poisson_arrivals_come_at_their_rate():
    jobs, _ = schedule(named("rate-5", 4000), 0)
    gaps = [after.arrival - before.arrival for before, after in itertools.pairwise(jobs)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.04, rel=0.15)


def test_the_mix_is_four_short_to_one_long():
    jobs, _ = schedule(named("c48-mix", 2000), 0)
    assert {job.prompt_tokens for job in jobs} == {200, 3000}
    assert sum(job.prompt_tokens == 200 for job in jobs) == pytest.approx(1600, abs=60)


def test_burst_prompts_are_of_16k_to_30k():
    jobs, burst = schedule(named("burst-32"), 0)
    assert len(jobs) == 16
    assert len(burst) == 32
    assert all(16_000 <= job.prompt_tokens <= 30_000 for job in burst)


def test_an_unknown_workload_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"no workload 'closed'; there are: closed-C"):
        named("closed")


def test_every_prompt_has_its_length_and_no_two_are_alike():
    jobs, _ = schedule(named("closed-4"), 0)
    prompts = {tuple(prompt_tokens(job, 30_000)) for job in jobs}
    assert {len(prompt) for prompt in prompts} == {640}
    assert len(prompts) == len(jobs)
    assert len(prompt_text(jobs[0]).split()) == 640
