"""The matrix multiplications of one step of a model on a CPU, each in the fastest layout there is: a bound.

No engine on the same kernels can take a step of so many rows in less.

    python -m tools.bench.matmul [--model smollm2-135m-instruct] [--rows 1,16] [--threads 1]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from mstar.distributed.matmul import Layout, lay_out
from mstar.model.files import resolve
from mstar.model.spec import ModelSpec, read_spec

__all__ = ["main"]

_REPEATS = 5
_LAYOUTS = (Layout.PLAIN, Layout.COLUMNS, Layout.COLUMNS_AND_BLOCKS)


def shapes(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """(outputs, inputs, how often a step) of every fused multiplication of the Llama line."""
    hidden, width = spec.hidden_size, spec.head_dim
    qkv = (spec.heads + 2 * spec.kv_heads) * width
    return [
        (qkv, hidden, spec.layers),
        (hidden, spec.heads * width, spec.layers),
        (2 * spec.ffn_size, hidden, spec.layers),
        (hidden, spec.ffn_size, spec.layers),
        (spec.vocab_size, hidden, 1),
    ]


def least_seconds(outputs: int, inputs: int, count: int, rows: int) -> float:
    """CPU seconds of ``count`` multiplications of different weights in float32, in the fastest layout."""
    x = torch.randn(rows, inputs)
    found = []
    for layout in _LAYOUTS:
        layers = [lay_out(torch.randn(outputs, inputs), None, layout).multiply for _ in range(count)]
        found.append(_best(lambda layers=layers: [multiply(x) for multiply in layers]))  # type: ignore[misc]
    return min(found)


def _best(work: Callable[[], object]) -> float:
    took = []
    for _ in range(_REPEATS):
        started = time.process_time()
        work()
        took.append(time.process_time() - started)
    return min(took)


def main(argv: list[str] | None = None) -> int:
    """Print milliseconds and GFLOP/s for each number of rows, and the rate of a large multiplication."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    spec = read_spec(resolve(options.model).directory)
    with torch.inference_mode():
        for rows in map(int, options.rows.split(",")):
            seconds = sum(least_seconds(*shape, rows) for shape in shapes(spec))
            work = sum(2 * rows * outputs * inputs * count for outputs, inputs, count in shapes(spec))
            print(f"{rows:4d} rows: {seconds * 1e3:7.1f} ms a step, {work / seconds / 1e9:6.1f} GFLOP/s")
        square = torch.randn(2048, 2048)
        print(f"2048 x 2048 by itself: {2 * 2048**3 / _best(lambda: square @ square) / 1e9:.1f} GFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
