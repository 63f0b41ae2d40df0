"""The command line: what it answers, what it refuses, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mstar import __version__
from mstar.cli.main import COMMANDS, main
from mstar.config.options import OPTIONS


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in OPTIONS:
        monkeypatch.delenv(entry.variable, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def misused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def told(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return str(line)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mstar {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert COMMANDS[command].capitalize() in capsys.readouterr().out


def test_a_wrong_command_or_flag_is_one_line_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean serve?" in misused(capsys, "sevre")
    assert misused(capsys, "serve", "--prot", "1").startswith("mstar serve: unrecognized arguments: --prot")
    assert "Did you mean --port?" in misused(capsys, "serve", "--prot", "1")
    assert "PROMPT" in misused(capsys, "generate")


def test_a_wrong_setting_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    line = told(capsys, 2, "serve", "--pipeline-depth", "9")
    assert (
        line
        == "mstar serve: pipeline_depth is '9' (flag --pipeline-depth); allowed is a whole number from 0 to 2"
    )
    assert "allowed is a whole number from 1 to 64" in told(capsys, 2, "config", "--tp", "65")
    assert "cannot be read" in told(capsys, 2, "serve", "none.yaml")
    assert "--log-file goes with --daemon" in told(capsys, 2, "serve", "--log-file", "x")


def test_without_a_server_the_commands_say_so_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in (("status",), ("generate", "x"), ("chat", "--once", "x")):
        assert f"no server answers on the Unix socket {tmp_path}/mstar/mstar.sock" in told(
            capsys, 1, *command
        )
    assert "no server of this host runs" in told(capsys, 1, "stop")
    assert told(capsys, 1, "status", "--url", "http://127.0.0.1:1") == (
        "mstar status: no server answers at http://127.0.0.1:1 (Connection refused)"
    )


def test_a_model_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, 1, "pull", "./none").startswith("mstar pull: There is no model")


def test_config_prints_every_value_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MSTAR_THREADS", "3")
    (tmp_path / "d.yaml").write_text("page_size: 8\n")
    assert main(["config", str(tmp_path / "d.yaml"), "--port", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["threads"] == {"value": "3", "source": "environment MSTAR_THREADS"}
    assert found["page_size"] == {"value": "8", "source": f"file {tmp_path}/d.yaml"}
    assert found["listen.port"] == {"value": "9", "source": "flag --port"}
    assert len(found) == len(OPTIONS)
    assert main(["config", "some-model"]) == 0
    assert "some-model" in capsys.readouterr().out.splitlines()[1]


def test_a_variable_that_nobody_reads_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_PROT", "3")
    assert main(["config"]) == 0
    assert "MSTAR_PROT has no effect; did you mean MSTAR_PORT?" in capsys.readouterr().err


PROBE = "import sys; from mstar.cli.main import main; code = main({arguments}); print(code, *sys.modules)"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--version"], ("asyncio", "msgspec", "yaml", "numpy", "torch")),
        (["status"], ("torch", "numpy", "aiohttp", "yaml", "tokenizers", "mstar.daemon", "mstar.gateway")),
        (["config"], ("torch", "numpy", "aiohttp", "asyncio")),
    ],
    ids=lambda value: value[0],
)
def test_what_should_answer_at_once_imports_little(arguments: list[str], heavy: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(arguments=arguments)], capture_output=True, text=True, check=True
    )
    assert not {*heavy} & {*done.stdout.splitlines()[-1].split()}
