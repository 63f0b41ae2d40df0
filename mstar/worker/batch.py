"""The fair split of a step's token budget over the rows that are still prefilling."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["split_fairly"]


def split_fairly(remaining: Sequence[int], room: int, floor: int) -> list[int]:
    """Max-min fair shares of ``room`` tokens, in the rows' order; 0 for a row that has to wait.

    No row gets more than it needs. A row gets at least ``floor`` tokens or all it needs, or
    nothing: later rows wait first, so that decodes which nearly fill the budget do not leave a
    prompt a token or two a step.
    """
    if sum(remaining) <= room:
        return list(remaining)
    shares = [0] * len(remaining)
    count = min(len(remaining), room // floor if floor > 0 and room >= floor else 0)
    if not count:
        if remaining and 0 < remaining[0] <= room:
            shares[0] = remaining[0]
        return shares
    left = count
    for row in sorted(range(count), key=remaining.__getitem__):
        share = min(remaining[row], room // left)
        shares[row] = share
        room -= share
        left -= 1
    for row in range(count, len(remaining)):
        if remaining[row] > room:
            break
        shares[row] = remaining[row]
        room -= remaining[row]
    return shares
