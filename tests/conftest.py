"""Fixtures of the whole suite: models, the leak guard, and the account of behaviours at the end of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Threads of the maths libraries multiply by processes on a small machine; read before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Without a GPU Triton kernels run in its interpreter, which it decides when it is imported.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.helpers import behaviours, leaks
from tests.helpers.tiny_model import write_tiny_model

DEFAULT_MODEL = "smollm2-135m-instruct"
leaks.mark()
# How long an example takes tells of the machine, not of the code; what fails is printed, to be replayed.
settings.register_profile(
    "suite",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")
_named = pytest.StashKey[set[str]]()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a process, a name in /dev/shm or a non-daemon thread is left."""
    before = leaks.trace()
    yield
    found = leaks.leftovers(before)
    if found:
        pytest.fail(f"{request.node.nodeid} left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in Hugging Face layout with a byte-level tokenizer; see tests/helpers."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model, SmolLM2-135M-Instruct, fetched once per machine."""
    from mstar.model.files import resolve

    directory: Path = resolve(DEFAULT_MODEL).directory
    return directory


def pytest_runtestloop(session: pytest.Session) -> None:
    """Fetch the default model before the first test, since no test's time limit allows for a download."""
    wanted = any("model_dir" in getattr(item, "fixturenames", ()) for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    from mstar.model.errors import ModelError
    from mstar.model.files import resolve

    # What went wrong is told by the tests that need the model; the others can run.
    with contextlib.suppress(ModelError, OSError):
        resolve(DEFAULT_MODEL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_named] = behaviours.named_by(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Account for the behaviours whenever the whole suite was collected."""
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS or config.args == ["tests"]
    if not whole or config.option.keyword:
        return
    terminalreporter.section("behaviours")
    for line in behaviours.summary(behaviours.read(), config.stash.get(_named, set())):
        terminalreporter.line(line)
