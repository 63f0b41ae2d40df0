"""What a machine must have before anything is downloaded, and the one error of setting up."""

from __future__ import annotations

import shutil
from pathlib import Path

GB = 10**9


class SetupError(Exception):
    """Setting up cannot go on; the message is one sentence that says how to mend it."""


def amount(nbytes: int) -> str:
    """A size for people: '191 MB', '2.6 GB'."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB else f"{nbytes / 10**6:.0f} MB"


def require_space(folder: Path, nbytes: int, purpose: str) -> None:
    """Raise SetupError unless `nbytes` are free where `folder` lies."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise SetupError(
            f"{purpose} needs {amount(nbytes)} of disk and {there} has {amount(free)} free: "
            "make room, or name a folder on another disk with VENV=/path."
        )


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver shows itself on this machine."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
