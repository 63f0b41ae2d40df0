"""CPU forward of a model beside transformers' in one process: ms a step, tok/s, GB/s reached.

    python -m tools.parity.cpu_forward [MODEL] [--dtype float32] [--threads 1] [--batches 1 8 16 64]

Both run the same shapes, alternating, on the same threads; the figure is the median and the minimum over
repeats. A decode step takes one token for each of B sequences with `--context` tokens in the cache; its bytes
are one reading of the weights and of the cached keys and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mstar.model.api import CausalLM, ForwardBatch, KVCache
from mstar.model.files import resolve
from mstar.model.weights import load_model

__all__ = ["main"]

_PAGE = 16


class _Figure(NamedTuple):
    name: str
    tokens: int
    nbytes: int
    ours: list[float]
    theirs: list[float]


class _Ours:
    """Our forward with `context` tokens in a cache whose pages lie in random order, or in a row."""

    def __init__(
        self, model: CausalLM, batch: int, context: int, dtype: torch.dtype, scattered: bool
    ) -> None:
        width = -(-(context + 1) // _PAGE)
        self._model, self._batch, self._context = model, batch, context
        self._kv = KVCache.allocate(model.spec, batch * width, _PAGE, dtype, torch.device("cpu"))
        for keys, values in zip(self._kv.keys, self._kv.values, strict=True):
            keys.normal_()
            values.normal_()
        pages = torch.randperm(batch * width) if scattered else torch.arange(batch * width)
        self._tables = pages.int().view(batch, width)

    def decode(self) -> None:
        at = self._context
        slots = self._tables[:, at // _PAGE].long() * _PAGE + at % _PAGE
        every = torch.arange(self._batch)
        tokens = torch.randint(3, 200, (self._batch,))
        positions = torch.full((self._batch,), at)
        lengths = [at + 1] * self._batch
        self._model(
            ForwardBatch(tokens, positions, slots, [1] * self._batch, lengths, self._tables, every), self._kv
        )

    def prefill(self, count: int) -> None:
        positions = torch.arange(count)
        slots = self._tables[0].long()[positions // _PAGE] * _PAGE + positions % _PAGE
        tokens, last = torch.randint(3, 200, (count,)), torch.tensor([count - 1])
        self._model(
            ForwardBatch(tokens, positions, slots, [count], [count], self._tables[:1], last), self._kv
        )


class _Theirs:
    """transformers with a DynamicCache of `context` tokens; it grows by a token a step."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        from transformers import DynamicCache

        self._model, self._batch = model, batch
        self._cache = DynamicCache(config=model.config)
        config = model.config
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            self._cache.update(torch.randn(shape).to(model.dtype), torch.randn(shape).to(model.dtype), layer)

    def decode(self) -> None:
        tokens = torch.randint(3, 200, (self._batch, 1))
        self._model(input_ids=tokens, cache=self._cache, use_cache=True)

    def prefill(self, count: int) -> None:
        self._model(input_ids=torch.randint(3, 200, (1, count)), use_cache=True, logits_to_keep=1)


def _alternate(
    clock: Callable[[], float], repeats: int, steps: int, *works: Callable[[], None]
) -> list[list[float]]:
    """Seconds a step of each work, `repeats` times `steps` steps, in turns, after one warm-up step."""
    seconds: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(repeats):
        for took, work in zip(seconds, works, strict=True):
            started = clock()
            for _ in range(steps):
                work()
            took.append((clock() - started) / steps)
    return seconds


def main() -> None:
    """Measure and print the table, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 16, 64])
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--scattered", action="store_true", help="pages in random order, not in a row")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, with one thread")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    dtype = getattr(torch, options.dtype)
    files = resolve(options.model)
    ours = load_model(files, dtype=dtype, device=torch.device("cpu"))
    theirs = None
    if not options.ours_only:
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(files.directory, dtype=dtype).eval()
    figures = []
    with torch.inference_mode():
        for batch in options.batches:
            nbytes = _step_bytes(ours, batch, options.context, dtype)
            works = [_Ours(ours, batch, options.context, dtype, options.scattered).decode]
            if theirs is not None:
                works.append(_Theirs(theirs, batch, options.context).decode)
            took = _alternate(clock, options.repeats, 3, *works)
            figures.append(_Figure(f"decode {batch}", batch, nbytes, took[0], took[-1] if theirs else []))
        if options.prefill:
            count = options.prefill
            works = [lambda: _Ours(ours, 1, count, dtype, options.scattered).prefill(count)]
            if theirs is not None:
                works.append(lambda: _Theirs(theirs, 1, 1).prefill(count))
            took = _alternate(clock, max(options.repeats // 2, 3), 1, *works)
            figures.append(_Figure(f"prefill {count}", count, 0, took[0], took[-1] if theirs else []))
    print(
        f"{files.name} {options.dtype}, {options.threads} threads, context {options.context}, "
        f"{'CPU' if options.cpu_time else 'wall'} time"
    )
    print(f"{'':14s}{'ours ms median (min)':>22s}{'tok/s':>8s}{'GB/s':>7s}{'theirs ms':>20s}{'ratio':>14s}")
    for figure in figures:
        print(_line(figure))
    print(json.dumps([figure._asdict() for figure in figures]))


def _step_bytes(model: CausalLM, batch: int, context: int, dtype: torch.dtype) -> int:
    spec = model.spec
    heads = spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    weights = (
        spec.layers * spec.hidden_size * (heads + 3 * spec.ffn_size) + spec.vocab_size * spec.hidden_size
    )
    return weights * dtype.itemsize + batch * context * KVCache.nbytes_per_page(spec, 1, dtype)


def _line(figure: _Figure) -> str:
    middle, least = statistics.median(figure.ours), min(figure.ours)
    text = f"{figure.name:14s}{middle * 1e3:12.1f} ({least * 1e3:7.1f}){figure.tokens / middle:8.0f}"
    text += f"{figure.nbytes / middle / 1e9:7.1f}" if figure.nbytes else f"{'':7s}"
    if figure.theirs:
        other, other_least = statistics.median(figure.theirs), min(figure.theirs)
        text += (
            f"{other * 1e3:10.1f} ({other_least * 1e3:7.1f}){other / middle:7.2f} ({other_least / least:.2f})"
        )
    return text


if __name__ == "__main__":
    main()
