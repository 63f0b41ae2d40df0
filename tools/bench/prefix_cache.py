"""What the prefix cache costs: hashing prompts in the gateway, and the ledger's work in a decider.

Hashing is by the thousand tokens, beside the same bytes hashed in one piece: the least it could take. The
ledger's calls are timed with nothing cached, with some pages cached, and with every free page cached, when
taking pages evicts others. CPU time, the least of several runs, for calls that change nothing in between;
the mean of all calls and the longest one where each call evicts.

    python -m tools.bench.prefix_cache [--pages 10000] [--page-size 16]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from mstar.messages.prefix import DIGEST_BYTES, page_digests
from mstar.worker.ledger import Ledger

__all__ = ["main"]

KEY = b"k" * 32
ROUNDS = 5
PROMPT = 2000


def least(work: Callable[[], object], times: int) -> float:
    """Microseconds of one call: of ``ROUNDS`` rounds of ``times`` calls the fastest."""
    found = []
    for _ in range(ROUNDS):
        started = time.thread_time_ns()
        for _ in range(times):
            work()
        found.append((time.thread_time_ns() - started) / times / 1e3)
    return min(found)


def random_tokens(count: int) -> NDArray[np.int32]:
    """Tokens of a prompt nobody has sent."""
    return np.random.default_rng().integers(0, 1 << 17, count).astype(np.int32)


def run_and_end(ledger: Ledger, digests: bytes) -> float:
    """A row takes its pages, files them and gives them back; microseconds of filing a page."""
    count = len(digests) // DIGEST_BYTES
    ledger.promise(count)
    pages = ledger.take(count).copy()
    started = time.thread_time_ns()
    ledger.file(pages, digests)
    filing = time.thread_time_ns() - started
    ledger.give(pages)
    return filing / count / 1e3


def hashing(page_size: int) -> None:
    """The gateway's part."""
    print(f"{'tokens':>8} {'us':>9} {'us/1000':>9} {'MB/s':>8} {'in one piece':>13}")
    for count in (1000, 8192, 131072):
        tokens = random_tokens(count)
        data = tokens.tobytes()
        times = max(1, 200_000 // count)
        took = least(lambda tokens=tokens: page_digests(tokens, page_size, KEY), times)  # type: ignore[misc]
        whole = least(lambda data=data: blake2b(data, key=KEY, digest_size=DIGEST_BYTES).digest(), times)  # type: ignore[misc]
        rate, most = len(data) / took, len(data) / whole
        print(f"{count:8} {took:9.1f} {took / count * 1e3:9.1f} {rate:8.0f} {most:13.0f}")


def turns(ledger: Ledger, title: str) -> None:
    """Taking pages and giving them back, none of them filed."""

    def turn(count: int) -> None:
        ledger.promise(count)
        ledger.give(ledger.take(count).copy())

    took = [least(lambda count=count: turn(count), 2000) for count in (1, 8, 64)]  # type: ignore[misc]
    print(f"{title:42} {took[0]:8.2f} {took[1]:8.2f} {took[2]:8.2f}")


def evictions(pages: int, page_size: int) -> None:
    """Taking pages of which none is free."""
    means, longest = [], []
    for count in (1, 8, 64):
        ledger = Ledger(pages)
        fill(ledger, pages, page_size)
        took = []
        for _ in range(min(1000, pages // 2 // count)):
            ledger.promise(count)
            started = time.thread_time_ns()
            ledger.take(count)
            took.append((time.thread_time_ns() - started) / 1e3)
        means.append(sum(took) / len(took))
        longest.append(max(took))
    print(f"{'take, all cached: mean':42} {means[0]:8.2f} {means[1]:8.2f} {means[2]:8.2f}")
    print(f"{'take, all cached: longest':42} {longest[0]:8.2f} {longest[1]:8.2f} {longest[2]:8.2f}")


def fill(ledger: Ledger, pages: int, page_size: int) -> float:
    """Let rows run and end until ``pages`` pages are cached; microseconds of filing a page."""
    found = []
    while ledger.cached < pages:
        count = min(-(-PROMPT // page_size), pages - ledger.cached)
        found.append(run_and_end(ledger, page_digests(random_tokens(count * page_size), page_size, KEY)))
    return sum(found) / len(found)


def hit(ledger: Ledger, page_size: int) -> float:
    """Microseconds of matching, leasing and giving back the pages of a prompt that is cached."""
    digests = page_digests(random_tokens(PROMPT), page_size, KEY)
    run_and_end(ledger, digests)
    other = digests[:DIGEST_BYTES]

    def one() -> None:
        ledger.match(other, 1)  # what was found last is remembered
        match = ledger.match(digests, PROMPT // page_size)
        ledger.give(ledger.lease(digests, match.pages))

    return least(one, 500)


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args(argv)
    hashing(options.page_size)
    print(f"\n{'ledger, us':42} {'1 page':>8} {'8':>8} {'64':>8}")
    ledger = Ledger(options.pages)
    turns(ledger, "take and give, nothing cached")
    filing = fill(ledger, options.pages // 2, options.page_size)
    turns(ledger, "take and give, half of the pool cached")
    evictions(options.pages, options.page_size)
    print(f"file a page: {filing:.2f} us")
    print(
        f"a hit of {PROMPT} tokens, matched, leased and given back: {hit(ledger, options.page_size):.1f} us"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
