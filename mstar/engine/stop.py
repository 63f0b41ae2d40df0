"""TokenStop: which rows of a step ended, from token ids and budgets alone. Text is the gateway's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mstar.messages.tokens import LENGTH, STOP

__all__ = ["finish_codes"]


def finish_codes(
    tokens: NDArray[np.int32],
    stop_ids: NDArray[np.int32],
    generated: NDArray[np.int32],
    cap: NDArray[np.int32],
) -> NDArray[np.int8]:
    """The verdict on each row: STOP where its token is a stop id, LENGTH at its cap, else RUNNING.

    ``tokens``, ``generated`` (this token included) and ``cap`` are [n]; ``stop_ids`` is [k, n],
    filled up with -1. Returns int8 [n]. A stop id on the last budgeted token is a STOP.
    """
    codes: NDArray[np.int8] = (generated >= cap).view(np.int8) * np.int8(LENGTH)
    for ids in stop_ids:
        codes[ids == tokens] = STOP
    return codes
