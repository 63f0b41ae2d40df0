"""`mstar simulate`: what it prints, what it refuses in one sentence, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mstar.cli.main import main
from mstar.cli.simulate import built_in
from mstar.config.options import OPTIONS
from mstar.simulation.cost import CostTable, Host, ModelFacts, encode_cost


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in OPTIONS:
        if entry.variable:
            monkeypatch.delenv(entry.variable, raising=False)


@pytest.fixture
def cost(tmp_path: Path) -> str:
    """The file of a small model's cost."""
    host = Host(step_ns=100_000, submit_ns=2e6, inline=True)
    table = CostTable(
        ModelFacts("toy", 4096, 46_080), tokens=(1, 512), tokens_ns=(20e6, 900e6), host=host, about="made up"
    )
    path = tmp_path / "cost.json"
    path.write_bytes(encode_cost(table))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_table_holds_what_the_json_says(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    asked = ("laptop", "--workload", "closed-2", "--requests", "3", "--cost", cost)
    figures = found(capsys, *asked)
    assert main(["simulate", *asked]) == 0
    text = capsys.readouterr().out
    total = figures["figures"]["all"]
    assert "costs: made up" in text
    assert f"{total['ttft_p50'] * 1e3:.1f} / {total['ttft_p99'] * 1e3:.1f}" in text
    assert (
        f"{figures['steps']} steps, 0 preemptions, {figures['pages_peak']} of {figures['pages_total']}"
        in text
    )
    assert "longest gap, ms" in text


def test_flags_of_a_deployment_act(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    asked = ("--workload", "closed-1", "--requests", "1", "--cost", cost)
    plain = found(capsys, *asked)
    other = found(
        capsys, *asked, "--max-num-batched-tokens", "96", "--pipeline-depth", "2", "--tp", "2", "--seed", "5"
    )
    assert (plain["batch_tokens"], plain["depth"], plain["ranks"], plain["seed"]) == (512, 1, 1, 0)
    assert (other["batch_tokens"], other["depth"], other["ranks"], other["seed"]) == (96, 2, 2, 5)
    assert found(capsys, *asked, "--max-num-batched-tokens", "off")["batch_tokens"] == "off"
    assert found(capsys, *asked, "--target-itl-ms", "40")["target_itl_ms"] == 40
    assert other["figures"]["all"]["ttft_p50"] != plain["figures"]["all"]["ttft_p50"]


def test_a_built_in_name_means_its_file(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    assert {"default", "laptop"} <= built_in().keys()
    asked = ("--workload", "closed-1", "--requests", "1", "--cost", cost)
    by_name = found(capsys, "laptop", *asked)
    assert by_name["slots"] == 8
    assert found(capsys, str(built_in()["laptop"]), *asked) == by_name


def test_a_plot_is_written_beside_the_table(
    capsys: pytest.CaptureFixture[str], cost: str, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.png"
    asked = ("--workload", "closed-1", "--requests", "1", "--cost", cost, "--plot", str(plot))
    assert main(["simulate", *asked]) == 0
    capsys.readouterr()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_simulated_is_one_sentence(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    assert "there is no workload 'burst'" in refused(capsys, "--workload", "burst", "--cost", cost)
    assert "the deployment's window holds" in refused(capsys, "--workload", "burst-8", "--cost", cost)
    assert "one of default, laptop" in refused(capsys, "laptp", "--workload", "closed-1")
    assert "cannot be read" in refused(capsys, "none.yaml", "--workload", "closed-1")
    assert "there is no cost 'h100'" in refused(capsys, "--workload", "closed-1", "--cost", "h100")
    assert "--requests is 0" in refused(capsys, "--workload", "closed-1", "--requests", "0")


def test_the_workload_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "default"])
    assert caught.value.code == 2
    assert "--workload" in capsys.readouterr().err


PROBE = """
import sys
from mstar.cli.main import main
code = main(["simulate", "--workload", "closed-1", "--requests", "1", "--cost", sys.argv[1], "--json"])
print(code, *sys.modules)
"""


def test_a_prediction_needs_neither_torch_nor_a_server(cost: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, cost], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.splitlines()[-1].split()}
    assert "mstar.simulation.predict" in loaded
    assert not {"torch", "aiohttp", "matplotlib", "mstar.daemon", "tokenizers"} & loaded


@pytest.mark.parametrize("workload", ["closed-99999999999999999999", "burst-1000001"])
def test_a_workload_beyond_any_machine_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], cost: str, workload: str
) -> None:
    assert "at most 1000000" in refused(capsys, "laptop", "--workload", workload, "--cost", cost)


def test_a_plot_that_cannot_be_written_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], cost: str, tmp_path: Path
) -> None:
    asked = ("laptop", "--workload", "closed-1", "--cost", cost, "--plot")
    assert "is a folder" in refused(capsys, *asked, str(tmp_path))
    assert "no folder" in refused(capsys, *asked, str(tmp_path / "none" / "x.png"))
