"""The fair split of a step's token budget over the rows that are still prefilling."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["split_fairly"]


def split_fairly(remaining: Sequence[int], room: int, floor: int) -> list[int]:
    """Max-min fair shares of ``room`` tokens, in the rows' order, oldest first; 0 for a row that waits.

    ``remaining`` is what each row still needs, at least 1. Rows that need less than an equal share go
    whole, the others split what is left evenly. No share is below ``floor``, unless it is all that
    the row needs: decodes that nearly fill the budget do not leave a prompt a token or two a step.

    Where not everybody can have that much, the oldest row comes first, so that nobody starves; then
    rows that end within ``floor`` tokens, which don't queue behind longer ones; then the others in
    their order. Whoever waits needs more than what was left over.

    While the room is too small for the oldest row, nobody passes it: those would decode next, and
    keep the room from growing.
    """
    if not remaining or sum(remaining) <= room:
        return list(remaining)
    shares = [0] * len(remaining)
    floor = max(floor, 1)
    left = room - min(remaining[0], floor)
    if left < 0:
        return shares
    served = [0]
    for row in range(1, len(remaining)):
        if remaining[row] <= floor and remaining[row] <= left:
            served.append(row)
            left -= remaining[row]
    if left >= floor:
        for row in range(1, len(remaining)):
            if remaining[row] > floor:
                served.append(row)
                left -= floor
                if left < floor:
                    break
    # The least that each of them must have fits together, so an equal share is never below it.
    served.sort(key=remaining.__getitem__)
    for place, row in enumerate(served):
        sharers = len(served) - place
        if remaining[row] * sharers > room:
            share, odd = divmod(room, sharers)
            for other, cut in enumerate(sorted(served[place:])):
                shares[cut] = share + (other < odd)
            break
        shares[row] = remaining[row]
        room -= remaining[row]
    return shares
