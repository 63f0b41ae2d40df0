"""Makes the virtual environment and installs the pinned packages; a second run ends at its stamp."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.setup import torch_build
from tools.setup.checks import GB, SetupError, has_nvidia_gpu, require_space
from tools.setup.pip import Pip, download_size

ROOT = Path(__file__).resolve().parents[2]
# The Python below an environment, where this runs in one.
BASE = Path(getattr(sys, "_base_executable", sys.executable))
# What each level installs beside the package itself; a later level contains the earlier ones.
LEVELS = {"run": ("uvloop", "plot"), "test": ("uvloop", "plot", "test", "bench")}
DISK = {"run": GB, "test": 2 * GB}
# A torch kept from the base Python brings the releases of these that it was built with.
_FOLLOW_TORCH = ("triton", "setuptools", "nvidia-", "sympy", "networkx")


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def fingerprint(root: Path, level: str, *, gpu: bool) -> str:
    """A digest of all that decides what is installed: locked versions, metadata, this Python, this place."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    parts = {
        "constraints": (root / "constraints.txt").read_text(encoding="utf-8"),
        "project": project["project"],
        "build": project["build-system"],
        "packages": project["tool"]["setuptools"],
        "torch": torch_build.PINNED,
        "python": sys.version,
        "root": str(root),
        "level": LEVELS[level],
        "gpu": gpu,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def stamp(venv: Path, level: str) -> Path:
    return venv / f".mstar-{level}"


def is_current(root: Path, venv: Path, level: str, *, gpu: bool) -> bool:
    """Whether this level, or one that contains it, is installed as the files say."""
    if not (venv / "bin" / "python").exists():
        return False
    levels = list(LEVELS)
    return any(
        stamp(venv, known).exists()
        and stamp(venv, known).read_text(encoding="utf-8") == fingerprint(root, known, gpu=gpu)
        for known in levels[levels.index(level) :]
    )


@contextmanager
def alone(venv: Path) -> Iterator[None]:
    """Hold the environment's lock, so that two makes at once set it up one after the other."""
    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{venv}.lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another setup works on {venv}, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _works(python: Path) -> bool:
    probe = "import sys; print(sys.version)"
    try:
        done = subprocess.run([str(python), "-c", probe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return done.stdout.strip() == sys.version.strip()


def make_venv(venv: Path, *, shared: bool) -> None:
    """Make the environment; one that is broken, or not of this Python, is made anew. Raises SetupError."""
    if _works(venv / "bin" / "python"):
        return
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise SetupError(
            f"{venv} is not a virtual environment: move it away, or name another folder with VENV=/path."
        )
    version = ".".join(str(part) for part in sys.version_info[:3])
    say(f"making {venv} with Python {version} ({BASE})")
    command = [
        str(BASE),
        "-m",
        "venv",
        "--clear",
        *(["--system-site-packages"] if shared else []),
        str(venv),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SetupError(
            f"{BASE} could not make {venv}: {said[-1] if said else 'it said nothing'} "
            "(on Debian and Ubuntu the package python3-venv is needed)."
        )


def _constraints(root: Path, venv: Path, *, kept_torch: bool) -> Path:
    locked = root / "constraints.txt"
    if not kept_torch:
        return locked
    lines = locked.read_text(encoding="utf-8").splitlines(keepends=True)
    written = venv / "constraints.txt"
    written.write_text("".join(x for x in lines if not x.startswith(_FOLLOW_TORCH)), encoding="utf-8")
    return written


def install(root: Path, venv: Path, level: str, *, gpu: bool, base: str | None) -> None:
    """Install torch first and alone, then the package with its extras, all locked. Raises SetupError."""
    pip = Pip(venv / "bin" / "python")
    locked = ["-c", str(_constraints(root, venv, kept_torch=base is not None))]
    say("build tools")
    pip.install([*locked, "setuptools"], "setuptools")
    if base is not None:
        say(f"torch {base} of {BASE} is kept")
    else:
        candidates = pip.candidates([*locked, torch_build.PINNED], "torch")
        plan = torch_build.plan(candidates, download_size(candidates), gpu=gpu)
        if plan.large:
            print(f"setup: {plan.message}", file=sys.stderr, flush=True)
        else:
            say(plan.message)
        require_space(venv, plan.disk, "torch")
        pip.install([*locked, plan.requirement], "torch")
    extras = ",".join([*LEVELS[level], *(["cuda"] if gpu else [])])
    say(f"mstar[{extras}] and what it depends on")
    require_space(venv, DISK[level], "mstar with what it depends on")
    # setuptools is there at its locked version, so nothing is fetched behind the lock's back.
    pip.install([*locked, "--no-build-isolation", "-e", f"{root}[{extras}]"], "mstar")


def set_up(root: Path, venv: Path, level: str) -> bool:
    """Bring the environment up to date; return whether there was anything to do. Raises SetupError."""
    gpu = has_nvidia_gpu()
    if is_current(root, venv, level, gpu=gpu):
        return False
    started = time.monotonic()
    with alone(venv):
        if is_current(root, venv, level, gpu=gpu):
            return False
        base = torch_build.base_torch(BASE) if gpu else None
        if base is not None and not torch_build.suits(base):
            base = None
        make_venv(venv, shared=base is not None)
        install(root, venv, level, gpu=gpu, base=base)
        stamp(venv, level).write_text(fingerprint(root, level, gpu=gpu), encoding="utf-8")
    say(f"done in {time.monotonic() - started:.0f} s")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="setup", description=__doc__)
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--venv", type=Path, default=Path(os.environ.get("VENV") or ROOT / ".venv"))
    options = parser.parse_args()
    try:
        set_up(ROOT, options.venv.absolute(), options.level)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {error.strerror or error}: {error.filename or options.venv}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
