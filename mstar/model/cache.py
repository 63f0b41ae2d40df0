"""The model cache: finished directories only, one writer a name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["FORMAT", "Progress", "cache_directory", "entry", "filling"]

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); bytes or items, total 0 where unknown."""

FORMAT = 1
"""Part of every entry's path: raised when a conversion changes, so that an old entry is never taken for a
new one."""


def cache_directory() -> Path:
    """$MSTAR_CACHE, else $XDG_CACHE_HOME/mstar, else ~/.cache/mstar."""
    if root := os.environ.get("MSTAR_CACHE"):
        return Path(root)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mstar"
    return Path.home() / ".cache" / "mstar"


def entry(name: str) -> Path:
    """Where the finished model `name` lies; the directory exists only when it is whole."""
    return cache_directory() / "models" / f"v{FORMAT}" / name


@contextlib.contextmanager
def filling(name: str, progress: Progress) -> Iterator[Path | None]:
    """Hold the lock of `name` and yield a scratch directory to fill; None where it was filled meanwhile.

    On a clean exit the scratch directory's `model` folder, flushed to disk, is renamed to `entry(name)`;
    on an error, nothing appears there. Scratch directories of killed processes are removed by the next
    holder: the lock dies with its process, so none of them can be in use.
    """
    final = entry(name)
    final.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".filling-{name}-"
    with open(final.parent / f".lock-{name}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another pull of the same model", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            yield None
            return
        for stale in final.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
        try:
            (scratch / "model").mkdir()
            yield scratch
            _flush(scratch / "model")
            os.rename(scratch / "model", final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _flush(directory: Path) -> None:
    for path in (*directory.iterdir(), directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
