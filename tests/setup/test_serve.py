"""`make serve` types what a person would, and can be run again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tools.setup import serve

MODEL = "smollm2-135m-instruct"


class Machine:
    """Stands in for the command line: what it was told, and which commands fail."""

    def __init__(self, daemon: dict[str, object] | None = None, *, failing: tuple[str, ...] = ()) -> None:
        self.daemon, self.failing = daemon, failing
        self.told: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        if arguments[0] == "status":
            found = json.dumps({"daemon": self.daemon})
            return subprocess.CompletedProcess(arguments, 0 if self.daemon else 1, found)
        self.told.append(arguments)
        return subprocess.CompletedProcess(arguments, int(arguments[0] in self.failing))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(machine: Machine, *arguments: str) -> int:
        monkeypatch.setattr(serve, "mstar", machine)
        monkeypatch.setattr(sys, "argv", ["serve", "--model", MODEL, "--port", "8000", *arguments])
        return serve.main()

    return run


def test_a_first_run_fetches_starts_and_asks(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    assert run(machine) == 0
    assert [words[0] for words in machine.told] == ["pull", "serve", "chat"]
    assert machine.told[1] == ("serve", MODEL, "--port", "8000", "--daemon")
    assert "stop it with make stop" in capsys.readouterr().out


def test_a_second_run_only_asks(run: Callable[..., int]) -> None:
    machine = Machine({"model": MODEL, "url": "http://127.0.0.1:8000"})
    assert run(machine) == 0
    assert [words[0] for words in machine.told] == ["chat"]


def test_another_model_on_the_socket_is_not_taken_for_this_one(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine({"model": "other", "url": "http://127.0.0.1:8000"})
    assert run(machine) == 1
    assert machine.told == []
    assert (
        "a server with other at http://127.0.0.1:8000 has this socket: make stop" in capsys.readouterr().err
    )


def test_further_flags_reach_the_server_and_its_socket_every_command(run: Callable[..., int]) -> None:
    machine = Machine()
    assert run(machine, "--uds", "/s", "--max-num-seqs", "4") == 0
    assert machine.told[1][-4:] == ("--max-num-seqs", "4", "--uds", "/s")
    assert machine.told[2][-2:] == ("--uds", "/s")


def test_a_model_without_a_chat_template_continues_a_text(run: Callable[..., int]) -> None:
    machine = Machine(failing=("chat",))
    assert run(machine) == 0
    assert [words[0] for words in machine.told] == ["pull", "serve", "chat", "generate"]


@pytest.mark.parametrize(("failing", "last"), [("pull", "pull"), ("serve", "serve")])
def test_a_step_that_failed_is_the_last(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], failing: str, last: str
) -> None:
    machine = Machine(failing=(failing,))
    assert run(machine) == 1
    assert machine.told[-1][0] == last
    # mstar has said why already.
    assert capsys.readouterr().err == ""


def test_a_port_that_is_no_number_is_one_sentence(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    assert run(machine, "--port", "abc") == 1
    assert machine.told == []
    assert capsys.readouterr().err == "serve: PORT is 'abc'; allowed is a whole number.\n"
