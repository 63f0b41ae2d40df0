"""Which build of torch to install, said with its size before it is fetched."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.setup.checks import amount
from tools.setup.pip import Candidate

PINNED = "torch==2.13.0"
OLDEST_WITH_GPU = (2, 11)
_PROBE = """
import torch
if torch.cuda.is_available():
    print(torch.__version__)
"""


class TorchPlan(NamedTuple):
    """What to install and what to tell about it; `disk` is what it takes unpacked, in bytes."""

    requirement: str
    message: str
    large: bool
    disk: int


def base_torch(python: Path) -> str | None:
    """The version of a torch that `python` imports and that sees a GPU; None where there is none."""
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def suits(version: str) -> bool:
    """Whether an installed torch is new enough to be kept on a machine with a GPU."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) >= OLDEST_WITH_GPU


def plan(candidates: Sequence[Candidate], size: int | None, *, gpu: bool) -> TorchPlan:
    """Describe what pip resolved for torch: a CPU build, or a CUDA build with its libraries."""
    torch = next((c for c in candidates if c.name == "torch"), None)
    if torch is None:
        return TorchPlan(PINNED, "torch is there already", large=False, disk=0)
    download = amount(size) if size is not None else "a size that the index does not tell"
    libraries = sum(c.name.startswith("nvidia-") for c in candidates)
    if not libraries:
        return TorchPlan(PINNED, f"torch {torch.version} ({download})", large=False, disk=10**9)
    message = (
        f"torch {torch.version}, a CUDA build with {libraries} NVIDIA libraries: a download of {download}"
    )
    if not gpu:
        message += (
            ". There is no GPU here, but the package index has no +cpu build for this Python; "
            "PIP_EXTRA_INDEX_URL may name an index that has one (0.2 GB)"
        )
    return TorchPlan(PINNED, message, large=True, disk=3 * (size or 3 * 10**9))
