"""A prompt sent again: how much sooner its first token comes when its pages are cached on every rank.

A real daemon of ``--tp`` ranks with a real model here. Each of ``--prompts`` random prompts is sent
twice in a row, greedy; the second time only what follows its last full page runs, on all ranks. Printed are
the times to the first token, their ratio, and how many prompt tokens the ranks did not compute again.

    python -m tools.bench.resend [--tp 3] [--tokens 1500] [--prompts 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from mstar.client.sync import Client
from tools.bench.long_prompt.server import Server, ServerFailed

SPREAD = 20_000
NEW_TOKENS = 8


class Sent(NamedTuple):
    """One prompt, sent twice: milliseconds to the first token, and whether the answers were the same."""

    first_ms: float
    again_ms: float
    same: bool


def ask(client: Client, prompt: list[int]) -> tuple[float, str]:
    """Milliseconds to the first token, and the whole text."""
    begun = time.perf_counter()
    first = 0.0
    text = []
    stream = client.generate(prompt, stream=True, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    for chunk in stream:
        first = first or time.perf_counter() - begun
        text.append(chunk.text)
    return first * 1e3, "".join(text)


def cached(client: Client) -> int:
    """Prompt tokens that the leader found in cached pages so far."""
    return int(client.status()["ranks"]["rank/0"]["cached_tokens"])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    flags = ["--tp", str(options.tp), "--threads", str(options.threads), "--dtype", "float32"]
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="resend-") as folder:
        with Server(options.model, flags, Path(folder)) as server, Client(server.socket) as client:
            ask(client, [5] * 40)
            before = cached(client)
            sent = []
            for _ in range(options.prompts):
                prompt = [rng.randrange(100, SPREAD) for _ in range(options.tokens)]
                (first, text), (again, repeated) = ask(client, prompt), ask(client, prompt)
                sent.append(Sent(first, again, text == repeated))
            skipped = cached(client) - before
    first = statistics.median(each.first_ms for each in sent)
    again = statistics.median(each.again_ms for each in sent)
    return {
        "ranks": options.tp,
        "prompt_tokens": options.tokens,
        "sent": [each._asdict() for each in sent],
        "first_ms": first,
        "again_ms": again,
        "ratio": first / again,
        "cached_tokens": skipped,
        "load": os.getloadavg()[0],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.resend", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="registry name or directory")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    try:
        found = measure(options)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    for each in found["sent"]:
        print(f"  {each['first_ms']:8.0f} ms, again {each['again_ms']:6.0f} ms, same answer: {each['same']}")
    share = found["cached_tokens"] / (options.tokens * options.prompts)
    print(
        f"{options.tp} ranks, {options.tokens} tokens: {found['first_ms']:.0f} ms the first time, "
        f"{found['again_ms']:.0f} ms again, {found['ratio']:.1f} times sooner; "
        f"{share:.1%} of the second prompts was not computed; load {found['load']:.1f}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
