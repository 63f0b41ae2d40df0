"""Setting up decides from the machine and the locked files, and says in one sentence why it cannot go on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.setup import bootstrap, checks, lock, torch_build
from tools.setup.checks import SetupError
from tools.setup.pip import Candidate, Pip, download_size, explain

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "tools" / "setup" / "setup.sh"
CPU = [Candidate("torch", "2.13.0+cpu", "file:///w/torch-2.13.0%2Bcpu-cp311-linux.whl")]
CUDA = [
    Candidate("torch", "2.13.0", "https://index/torch-2.13.0-cp312-linux.whl"),
    Candidate("nvidia-cublas", "13.1", "https://index/nvidia_cublas-13.1.whl"),
    Candidate("sympy", "1.14", "https://index/sympy-1.14.whl"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the two files that decide what is installed."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    return root


class Recorder(NamedTuple):
    """What a fake pip was asked to install, in order."""

    installs: list[list[str]]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder([])

    def install(self: Pip, arguments: list[str], what: str) -> None:
        recorder.installs.append([a for a in arguments if a != "-c" and not a.endswith("constraints.txt")])

    def candidates(self: Pip, arguments: list[str], what: str) -> list[Candidate]:
        return CPU

    monkeypatch.setattr(Pip, "install", install)
    monkeypatch.setattr(Pip, "candidates", candidates)
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(bootstrap, "make_venv", fake_venv)
    return recorder


def fake_venv(venv: Path, *, shared: bool) -> None:
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "bin" / "python").touch()


def test_torch_is_installed_before_anything_that_needs_it(checkout: Path, pip: Recorder) -> None:
    bootstrap.set_up(checkout, checkout / ".venv", "run")
    assert pip.installs == [
        ["setuptools"],
        ["torch==2.13.0"],
        ["--no-build-isolation", "-e", f"{checkout}[uvloop,plot]"],
    ]


def test_a_second_run_installs_nothing(checkout: Path, pip: Recorder) -> None:
    assert bootstrap.set_up(checkout, checkout / ".venv", "run")
    pip.installs.clear()
    assert not bootstrap.set_up(checkout, checkout / ".venv", "run")
    assert pip.installs == []


def test_what_the_tests_need_contains_what_serving_needs(checkout: Path, pip: Recorder) -> None:
    assert bootstrap.set_up(checkout, checkout / ".venv", "test")
    assert not bootstrap.set_up(checkout, checkout / ".venv", "run")
    assert "[uvloop,plot,test,bench]" in pip.installs[-1][-1]


def test_what_serving_needs_is_not_enough_for_the_tests(checkout: Path, pip: Recorder) -> None:
    assert bootstrap.set_up(checkout, checkout / ".venv", "run")
    assert bootstrap.set_up(checkout, checkout / ".venv", "test")


@pytest.mark.parametrize(
    ("name", "old", "new", "again"),
    [
        ("constraints.txt", "numpy==", "numpy==9.", True),
        ("pyproject.toml", '"torch>=2.11"', '"torch>=2.12"', True),
        ("pyproject.toml", "line-length = 110", "line-length = 111", False),
    ],
)
def test_only_what_decides_the_environment_makes_it_anew(
    checkout: Path, pip: Recorder, name: str, old: str, new: str, again: bool
) -> None:
    bootstrap.set_up(checkout, checkout / ".venv", "run")
    file = checkout / name
    assert old in file.read_text(encoding="utf-8")
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    assert bootstrap.set_up(checkout, checkout / ".venv", "run") is again


def test_a_setup_that_failed_is_tried_again(
    checkout: Path, pip: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Pip.install

    def fail(self: Pip, arguments: list[str], what: str) -> None:
        raise SetupError("no network")

    monkeypatch.setattr(Pip, "install", fail)
    with pytest.raises(SetupError):
        bootstrap.set_up(checkout, checkout / ".venv", "run")
    monkeypatch.setattr(Pip, "install", whole)
    assert bootstrap.set_up(checkout, checkout / ".venv", "run")


def test_a_torch_of_the_base_python_is_kept_on_a_gpu_machine(
    checkout: Path, pip: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch_build, "base_torch", lambda python: "2.12.1+cu130")
    bootstrap.set_up(checkout, checkout / ".venv", "run")
    assert pip.installs == [["setuptools"], ["--no-build-isolation", "-e", f"{checkout}[uvloop,plot,cuda]"]]
    kept = (checkout / ".venv" / "constraints.txt").read_text(encoding="utf-8")
    assert "numpy==" in kept
    assert "triton==" not in kept


def test_a_torch_that_is_too_old_is_not_kept(
    checkout: Path, pip: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch_build, "base_torch", lambda python: "2.9.1+cu126")
    bootstrap.set_up(checkout, checkout / ".venv", "run")
    assert ["torch==2.13.0"] in pip.installs


def test_the_cpu_build_is_announced_with_its_size() -> None:
    plan = torch_build.plan(CPU, 201_000_000, gpu=False)
    assert plan.message == "torch 2.13.0+cpu (201 MB)"
    assert not plan.large


def test_a_cuda_build_is_announced_with_its_size_before_it_is_fetched() -> None:
    plan = torch_build.plan(CUDA, 2_640_000_000, gpu=False)
    assert plan.large
    assert "a CUDA build with 1 NVIDIA libraries: a download of 2.6 GB" in plan.message
    assert "PIP_EXTRA_INDEX_URL" in plan.message
    assert plan.disk == 3 * 2_640_000_000


def test_a_size_that_nobody_tells_is_said_to_be_unknown() -> None:
    assert "a size that the index does not tell" in torch_build.plan(CUDA, None, gpu=True).message


def test_the_size_of_local_files_is_read_from_them(tmp_path: Path) -> None:
    wheel = tmp_path / "a+b.whl"
    wheel.write_bytes(bytes(1234))
    files = [Candidate("a", "1", wheel.as_uri()), Candidate("b", "1", wheel.as_uri())]
    assert download_size(files) == 2468
    assert download_size([Candidate("c", "1", (tmp_path / "none.whl").as_uri())]) is None


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("OSError: [Errno 28] No space left on device", "pip could not install x, since the disk is full"),
        ("WARNING: Retrying: NewConnectionError(...)", "no package index could be reached"),
        (
            "ERROR: No matching distribution found for x==9",
            "it said: ERROR: No matching distribution found for x==9",
        ),
        ("", "it said: nothing"),
    ],
)
def test_a_failed_pip_run_is_explained_in_a_sentence(output: str, sentence: str) -> None:
    assert sentence in str(explain(output, "x"))


def test_too_little_disk_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"torch needs 1000000\.0 GB of disk and .* has .* free"):
        checks.require_space(tmp_path / "not" / "there", 10**15, "torch")


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SetupError, match="is not a virtual environment"):
        bootstrap.make_venv(tmp_path, shared=False)
    assert (tmp_path / "thesis.txt").exists()


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs setup.sh in a checkout of its own, on a machine with these programs only (name: shell body)."""
    setup = tmp_path / "tools" / "setup" / "setup.sh"
    setup.parent.mkdir(parents=True)
    shutil.copy(SETUP, setup)
    tools = tmp_path / "bin"
    tools.mkdir()

    def run(programs: dict[str, str], **setting: str) -> subprocess.CompletedProcess[str]:
        for name, body in programs.items():
            file = tmp_path / name if "/" in name else tools / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"#!{shutil.which('sh')}\n{body}\n", encoding="utf-8")
            file.chmod(0o755)
        for name in ("sh", "dirname", "uname"):
            if not (tools / name).exists():
                (tools / name).symlink_to(str(shutil.which(name)))
        return subprocess.run(
            [str(tools / "sh"), str(setup), "run"],
            env={"PATH": str(tools), **setting},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


OLD = '[ "$1" = --version ] && echo Python 3.10.2'
GOOD = '[ "$1" = -m ] && echo "${0##*/} $*"; exit 0'
BARE = 'case "$2" in *ensurepip*) exit 1;; esac'
PYTHONS = ("python3", "python3.11", "python3.12", "python3.13", "python")


@pytest.mark.parametrize(
    ("machine", "setting", "sentence"),
    [
        ({"uname": "echo Darwin"}, {}, "M* runs on Linux only, and this is Darwin."),
        ({"uname": '[ "$1" = -s ] && echo Linux || echo aarch64'}, {}, "M* runs on x86-64 only"),
        ({}, {"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python cannot be run."),
        ({"old": OLD}, {"PYTHON": "old"}, "PYTHON=old is Python 3.10.2, and M* needs Python 3.11 or newer."),
        (dict.fromkeys(PYTHONS, OLD), {}, "M* needs Python 3.11 or newer, and there is Python 3.10.2"),
        ({}, {}, "M* needs Python 3.11 or newer, and there is no python3 at all"),
        ({"python3": BARE}, {}, "python3 has no venv module: install it (on Debian and Ubuntu the package"),
    ],
)
def test_an_unfit_machine_is_told_in_one_sentence(
    shell: Callable[..., subprocess.CompletedProcess[str]],
    machine: dict[str, str],
    setting: dict[str, str],
    sentence: str,
) -> None:
    done = shell(machine, **setting)
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("machine", "setting", "chosen"),
    [
        ({"python3": OLD, "python3.12": GOOD}, {}, "python3.12"),
        ({"python3": BARE, "python3.13": GOOD}, {}, "python3.13"),
        ({"python3": GOOD, "mine": GOOD}, {"PYTHON": "mine"}, "mine"),
        ({"python3": OLD, ".venv/bin/python": GOOD}, {}, "python"),
        ({"python3": GOOD, ".venv/bin/python": "exit 1"}, {}, "python3"),
    ],
)
def test_the_first_python_that_fits_gets_the_work(
    shell: Callable[..., subprocess.CompletedProcess[str]],
    machine: dict[str, str],
    setting: dict[str, str],
    chosen: str,
) -> None:
    done = shell(machine, **setting)
    assert done.stdout == f"{chosen} -m tools.setup.bootstrap run\n"


def test_a_lock_keeps_comments_and_pins_of_what_is_not_here() -> None:
    old = "# why\nflashinfer-python==0.7.2\nnumpy==2.0\n"
    frozen = "numpy==2.4.6\ntorch==2.13.0+cpu\n-e git+x#egg=mstar\nJinja2==3.1.6\nother @ file:///x\n"
    assert lock.merge(old, frozen) == "# why\nflashinfer-python==0.7.2\nJinja2==3.1.6\nnumpy==2.4.6\n"


def test_the_lock_names_no_place_and_no_local_build() -> None:
    pins = [x for x in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if x[0] != "#"]
    assert len(pins) > 60
    assert [pin for pin in pins if "@" in pin or "+" in pin or "://" in pin or "==" not in pin] == []
    assert [pin for pin in pins if pin.startswith(("torch==", "nvidia-", "pip=="))] == []
