"""Costs by name: one H200 worked out from measured ceilings, CPUs measured by ``tools.bench.step_cost``.

The H200 in bf16, captured steps, no scheduler and no gateway in the measurements: large copies reach
4.2 TB/s, large matrix multiplications 625 to 774 TFLOP/s. What each model makes of it:

* Qwen3-8B: the multiplications of one decode step, weights read from memory, take 4.34 ms (15.1 GB at
  3.5 TB/s); small kernels and short attention 0.8 ms; decode attention reads keys and values at 3.8 TB/s;
  chunked prefill attention computes at 509 TFLOP/s. That gives decode steps of 5.2 / 6.1 / 7.1 / 14.6 ms at
  1 / 32 / 64 / 256 rows of 768 tokens, where a captured step was measured at 5.14 / 6.24 / 7.35 / 15.1, and
  31k prefill tokens a second at a budget of 2048 beside 16 decodes, where a peer was measured at 30.7k.
* Qwen3-0.6B: multiplications 0.79 ms, the rest 0.72: 1.5 / 2.3 / 3.0 / 7.4 ms; measured were 1.54 / 2.15 /
  2.95 / 7.36.
* Qwen3.5-0.8B: from a peer's kernels alone, 1.45 / 1.81 / 5.00 ms busy at 1 / 32 / 256 rows; its recurrent
  state is 18.9 MB a row, read and written in each step.
* Qwen3.5-9B: from its shapes and the ceilings above; never measured.

Collectives of two and more GPUs are an assumption until they are measured: 10 us for each all-reduce, and
300 GB/s.
"""

from __future__ import annotations

from pathlib import Path

from mstar.config.load import ConfigError
from mstar.simulation.cost import Collective, Cost, Host, ModelFacts, Roofline, read_cost

__all__ = ["find_cost", "preset", "preset_names"]

_FOLDER = Path(__file__).parent

_HOST = Host(step_ns=100_000, row_ns=450, submit_ns=2_000_000, submit_token_ns=60, deliver_ns=300_000)
"""The rank's thread as measured with a null forward on two cores; the way through the gateway is a guess."""

_MEMORY = 0.85 * (139 << 30)
"""What may be used of an H200's memory."""

_DEFAULT_BUDGET = 8192


def _collective(layers: int, hidden: int) -> Collective:
    """Two all-reduces a layer, of a bf16 vector for each token."""
    return Collective(step_ns=2 * layers * 10_000, token_ns=2 * layers * hidden * 2 / 300e9 * 1e9)


def _h200(
    name: str,
    *,
    layers: int,
    hidden: int,
    body: float,
    head: float,
    window: int,
    kv_token_bytes: int,
    gemm_seconds: float,
    flops: float,
    pair_flops: float,
    pair_rate: float,
    fixed_ns: float,
    row_ns: float = 0.0,
    about: str,
) -> Roofline:
    """A model on one H200: ``body`` and ``head`` in parameters, ``gemm_seconds`` to read both once."""
    weights = 2 * (body + head)
    return Roofline(
        model=ModelFacts(name, window, kv_token_bytes, round(_MEMORY - weights), _DEFAULT_BUDGET),
        weight_bytes=weights,
        weight_bytes_per_second=weights / gemm_seconds,
        token_flops=2 * body,
        row_flops=2 * head,
        flops_per_second=flops,
        kv_bytes_per_second=3.8e12,
        pair_flops=pair_flops,
        pair_flops_per_second=pair_rate,
        fixed_ns=fixed_ns,
        row_ns=row_ns,
        host=_HOST,
        collective=_collective(layers, hidden),
        about=about,
    )


_COMPUTED: dict[str, Roofline] = {
    "h200-qwen3-8b": _h200(
        "qwen3-8b",
        layers=36,
        hidden=4096,
        body=6.95e9,
        head=0.62e9,
        window=40_960,
        kv_token_bytes=147_456,
        gemm_seconds=4.34e-3,
        flops=625e12,
        pair_flops=4 * 32 * 128 * 36,
        pair_rate=509e12,
        fixed_ns=800_000,
        about="Qwen3-8B in bf16 on one H200, from measured kernels",
    ),
    "h200-qwen3-0.6b": _h200(
        "qwen3-0.6b",
        layers=28,
        hidden=1024,
        body=0.44e9,
        head=0.156e9,
        window=40_960,
        kv_token_bytes=114_688,
        gemm_seconds=0.79e-3,
        flops=480e12,
        pair_flops=4 * 16 * 128 * 28,
        pair_rate=509e12,
        fixed_ns=720_000,
        about="Qwen3-0.6B in bf16 on one H200, from measured kernels",
    ),
    "h200-qwen3.5-0.8b": _h200(
        "qwen3.5-0.8b",
        layers=24,
        hidden=1024,
        body=0.5e9,
        head=0.254e9,
        window=262_144,
        kv_token_bytes=12_288,
        gemm_seconds=0.6e-3,
        flops=410e12,
        pair_flops=4 * 8 * 256 * 6,
        pair_rate=426e12,
        fixed_ns=840_000,
        row_ns=10_200,
        about="Qwen3.5-0.8B in bf16 on one H200, from a peer's busy time",
    ),
    "h200-qwen3.5-9b": _h200(
        "qwen3.5-9b",
        layers=32,
        hidden=4096,
        body=7.0e9,
        head=1.02e9,
        window=262_144,
        kv_token_bytes=32_768,
        gemm_seconds=16.04e9 / 3.5e12,
        flops=625e12,
        pair_flops=4 * 16 * 256 * 8,
        pair_rate=426e12,
        fixed_ns=900_000,
        row_ns=20_000,
        about="Qwen3.5-9B in bf16 on one H200, from its shapes and the device's ceilings; not measured",
    ),
}


def preset_names() -> list[str]:
    """The names, sorted."""
    return sorted([*_COMPUTED, *(path.stem for path in _FOLDER.glob("*.json"))])


def preset(name: str) -> Cost:
    """The cost called ``name``; raises ConfigError naming those that exist."""
    if name in _COMPUTED:
        return _COMPUTED[name]
    if name in preset_names():
        return read_cost(_FOLDER / f"{name}.json")
    raise ConfigError(
        f"there is no cost {name!r}; allowed are a JSON file or one of {', '.join(preset_names())}"
    )


def find_cost(text: str | None, model: str) -> Cost:
    """What ``--cost`` means: a file, a name, or, where nothing was said, the preset of ``model``.

    Raises ConfigError where no preset fits the model.
    """
    if text is not None:
        return read_cost(Path(text)) if text.endswith(".json") or "/" in text else preset(text)
    wanted = Path(model).name.lower()
    for name in preset_names():
        found = preset(name)
        if found.model.name == wanted:
            return found
    raise ConfigError(
        f"no cost is known for the model {model}: give --cost FILE, which `python -m tools.bench.step_cost` "
        f"writes, or one of {', '.join(preset_names())}"
    )
