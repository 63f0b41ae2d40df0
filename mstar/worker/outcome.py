"""What a landed step left on the host, and what that means for the owners of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.tokens import RowFailed, TokenBatch

__all__ = ["Landed", "StepResult"]


class StepResult(NamedTuple):
    """What a landed step left on the host, indexed by slot.

    ``tokens`` int32 [slots]; when asked for ``logprob`` float32 [slots], ``top_ids`` int32 [slots, 20],
    ``top_logprobs`` float32 [slots, 20]. ``failed`` is the sentence to tell all rows of a failed step,
    ``failed_slots`` what to tell single rows. ``elapsed_ns`` is how long the device ran it.
    """

    tokens: NDArray[np.int32]
    logprob: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    failed: str | None = None
    failed_slots: Mapping[int, str] = MappingProxyType({})
    elapsed_ns: int = 0


class Landed(NamedTuple):
    """What a landed step means for the owners of its rows."""

    batch: TokenBatch | None
    failed: list[RowFailed]
