"""`python -m tools.bench.serving`: one or more workloads against a running server."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import aiohttp
import msgspec

from tools.bench.serving.client import Client, Target
from tools.bench.serving.load import run
from tools.bench.serving.plot import plot
from tools.bench.serving.report import Report, as_json, make_report, table
from tools.bench.serving.workload import WORKLOADS, Job, Workload, named, schedule


async def measure(target: Target, workload: Workload, *, label: str, seed: int, warmup: int) -> Report:
    """Warm up, then run ``workload`` once. The client's CPU is counted over the run alone."""
    clock = time.perf_counter
    jobs, burst = schedule(workload, seed)
    async with Client(target, clock=clock) as client:
        warm = [Job("warm-up", 16, 8, seed=place) for place in range(warmup)]
        for exchange in await asyncio.gather(*(client.send(job, clock()) for job in warm)):
            if exchange.error:
                raise SystemExit(f"The warm-up failed: {exchange.error}")
        cpu, begun = time.process_time(), clock()
        exchanges = await run(client, workload, jobs, burst, clock)
        used = (time.process_time() - cpu) / (clock() - begun)
    return make_report(label, workload, exchanges, used)


async def first_model(url: str, uds: str | None, api_key: str | None) -> str:
    """The first model that the server lists."""
    connector = aiohttp.UnixConnector(uds) if uds else aiohttp.TCPConnector()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        async with session.get(url.rstrip("/") + "/v1/models") as response:
            response.raise_for_status()
            models = (await response.json())["data"]
    if not models:
        raise SystemExit(f"{url} lists no model; name one with --model.")
    return str(models[0]["id"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.serving", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="root of the server, without /v1")
    parser.add_argument("--uds", help="Unix socket to connect to instead of the URL's host")
    parser.add_argument("--model", help="default: the first one the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--workload", action="append", metavar="NAME", help=f"repeatable; {WORKLOADS}")
    parser.add_argument("--requests", type=int, help="how many, instead of the workload's own number")
    parser.add_argument("--prompt-tokens", type=int, help="one prompt length for all")
    parser.add_argument("--output-tokens", type=int, help="one output length for all")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument("--prompt", choices=["tokens", "text"], default="tokens")
    parser.add_argument("--vocab-size", type=int, default=30_000, help="prompt ids stay below it")
    parser.add_argument("--no-ignore-eos", action="store_true", help="for servers that refuse the field")
    parser.add_argument("--extra", default="{}", metavar="JSON", help="further fields of every request")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=2, help="requests sent and forgotten before each run")
    parser.add_argument("--label", default="server", help="the server's name in table and plot")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    if arguments.endpoint == "chat":
        arguments.prompt = "text"
    return arguments


def adjusted(workload: Workload, prompt: int | None, output: int | None) -> Workload:
    """``workload`` with one prompt length or output length for all, where given."""
    mix = tuple(
        (weight, prompt or low, prompt or high, output or length)
        for weight, low, high, length in workload.mix
    )
    return msgspec.structs.replace(workload, mix=mix)


def main() -> None:
    arguments = parse()
    try:
        workloads = [
            adjusted(named(name, arguments.requests), arguments.prompt_tokens, arguments.output_tokens)
            for name in arguments.workload or ["closed-8"]
        ]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    model = arguments.model or asyncio.run(first_model(arguments.url, arguments.uds, arguments.api_key))
    target = Target(
        url=arguments.url,
        model=model,
        uds=arguments.uds,
        endpoint=arguments.endpoint,
        prompt=arguments.prompt,
        vocab_size=arguments.vocab_size,
        api_key=arguments.api_key,
        ignore_eos=not arguments.no_ignore_eos,
        extra=msgspec.json.decode(arguments.extra),
    )
    reports = [
        asyncio.run(
            measure(
                target, workload, label=arguments.label, seed=arguments.seed + turn, warmup=arguments.warmup
            )
        )
        for turn in range(arguments.repeat)
        for workload in workloads
    ]
    print(table(reports))
    if arguments.json:
        arguments.json.write_bytes(as_json(reports))
    if arguments.plot:
        plot(reports, arguments.plot)


if __name__ == "__main__":
    main()
