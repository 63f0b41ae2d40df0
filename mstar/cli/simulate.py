"""`mstar simulate`: what a workload would see of a deployment, without running it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mstar.cli.settings import add_settings, resolved
from mstar.cli.table import ProgressLine, print_table
from mstar.config.load import ConfigError

if TYPE_CHECKING:
    from mstar.simulation.figures import Figures
    from mstar.simulation.predict import Prediction
    from mstar.simulation.setting import Setting

__all__ = ["add_arguments", "run"]

_CONFIGS = Path(__file__).parents[2] / "configs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload, the cost, what comes out, and every setting of a deployment."""
    parser.add_argument(
        "--workload",
        required=True,
        metavar="NAME",
        help="what clients send: closed-C, c48-mix, rate-R, burst-B, mixed-8x16k, parity-C, parity-112-C, "
        "long-beside-decodes or short-burst, with a number for C, R and B",
    )
    parser.add_argument(
        "--cost",
        metavar="FILE|NAME",
        help="what steps cost: a JSON file or a name such as h200-qwen3-8b; by default the one of the model",
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help="how many, instead of the workload's own number"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="lengths, arrivals and ties follow from it"
    )
    parser.add_argument(
        "--plot", metavar="PNG", help="draw gaps, steps and requests over time into this file"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Predict, then print the figures and a timeline. Exit code 2 for what cannot be simulated."""
    # The simulator is imported here: no other command should wait for it.
    from mstar.simulation.plot import check_path, timeline, write_plot
    from mstar.simulation.predict import predict
    from mstar.simulation.presets import find_cost
    from mstar.simulation.setting import setting_of
    from mstar.simulation.workloads import named

    if options.requests is not None and options.requests < 1:
        raise ConfigError(f"--requests is {options.requests}; allowed is a whole number of at least 1")
    workload = named(options.workload, options.requests)
    if options.plot:
        check_path(Path(options.plot))
    _find_deployment(options)
    found = resolved(options)
    cost = find_cost(options.cost, found.deployment.model)
    setting = setting_of(found, cost.model)
    line = ProgressLine()
    try:
        prediction = predict(
            setting,
            workload,
            cost,
            seed=options.seed,
            progress=lambda done, due: line(f"simulating {workload.name}", done * 1000 // max(due, 1), 1000),
        )
    finally:
        line.clear()
    if options.plot:
        write_plot(prediction, Path(options.plot))
    if options.json:
        _print_json(prediction, setting)
    else:
        _show(prediction, setting, cost.about)
        print()
        print(timeline(prediction))
    return 0


def built_in() -> dict[str, Path]:
    """The deployments that come with the code, by name."""
    return {path.stem: path for path in sorted(_CONFIGS.glob("*.yaml"))}


def _find_deployment(options: argparse.Namespace) -> None:
    """A name of a built-in deployment means its file; anything else is a file, or a model that has a cost."""
    from mstar.simulation.presets import preset, preset_names

    target = options.target
    if target is None or target.endswith((".yaml", ".yml")):
        return
    if target in (known := built_in()):
        options.config, options.target = str(known[target]), None
        return
    models = sorted({preset(name).model.name for name in preset_names()})
    if Path(target).name.lower() not in models:
        raise ConfigError(
            f"there is no deployment {target!r}; allowed are a .yaml file, one of "
            f"{', '.join(known) or 'none'}, or a model whose costs are known: {', '.join(models)}"
        )


def _settings(prediction: Prediction, setting: Setting) -> dict[str, object]:
    limits = setting.limits
    return {
        "workload": prediction.workload,
        "cost": prediction.cost,
        "seed": prediction.seed,
        "ranks": setting.ranks,
        "slots": limits.slots,
        "batch_tokens": limits.batch_tokens if limits.chunked else "off",
        "target_itl_ms": limits.target_itl_ns / 1e6 or None,
        "depth": limits.depth,
    }


def _totals(prediction: Prediction) -> dict[str, object]:
    return {
        "seconds": prediction.seconds,
        "steps": len(prediction.steps),
        "preempted": prediction.preempted,
        "refused": prediction.refused,
        "pages_total": prediction.pages_total,
        "pages_peak": prediction.pages_peak,
    }


def _print_json(prediction: Prediction, setting: Setting) -> None:
    import msgspec

    whole = {**_settings(prediction, setting), **_totals(prediction), "figures": prediction.figures}
    print(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())


def _show(prediction: Prediction, setting: Setting, about: str) -> None:
    shown = ((name.replace("_", " "), value) for name, value in _settings(prediction, setting).items())
    print(", ".join(f"{name} {value}" for name, value in shown if value is not None))
    if about:
        print(f"costs: {about}")
    print()
    head = (
        *("group", "requests", "failed", "TTFT p50 / p99", "ITL p50 / p99 / max"),
        *("gaps", "stalls", "decode rate", "prefill tok/s", "tok/s", "req/s"),
    )
    print_table([head, *(_cells(group, figures) for group, figures in prediction.figures.items())])
    print()
    print(
        f"{prediction.seconds:.2f} s, {len(prediction.steps)} steps, {prediction.preempted} preemptions, "
        f"{prediction.pages_peak} of {prediction.pages_total} pages at most"
    )
    print(
        "Times are in ms, rates a second; a gap is over 50 ms, a stall over 1 s; the decode rate is that of "
        "one stream, and victims are the streams that a burst ran into."
    )


def _cells(group: str, figures: Figures) -> tuple[str, ...]:
    return (
        group,
        str(figures.requests),
        str(figures.failed),
        _times(figures.ttft_p50, figures.ttft_p99),
        _times(figures.itl_p50, figures.itl_p99, figures.itl_max),
        str(figures.gaps),
        str(figures.stalls),
        _number(figures.decode_rate, ".1f"),
        _number(figures.prefill_rate, ",.0f"),
        _number(figures.output_tokens_per_second, ",.1f"),
        _number(figures.requests_per_second, ".2f"),
    )


def _times(*seconds: float) -> str:
    return " / ".join(_number(second * 1e3, ".1f") for second in seconds)


def _number(value: float, form: str) -> str:
    return "-" if value != value else f"{value:{form}}"
