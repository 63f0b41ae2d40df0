"""Named failures of the shared-memory room."""

from __future__ import annotations

__all__ = [
    "BadHandle",
    "ColumnMismatch",
    "LayoutMismatch",
    "NoSharedMemory",
    "Poisoned",
    "RecordTooLarge",
    "RingStuck",
    "ShmError",
    "SlabExhausted",
    "TornRecord",
    "UnsupportedPlatform",
]


class ShmError(Exception):
    """Base of everything this room raises on purpose."""


class UnsupportedPlatform(ShmError):
    """The machine does not order stores the way the rings rely on."""


class NoSharedMemory(ShmError):
    """The host cannot give the memory that was asked for.

    `needed` and `free` are bytes; `free` is None where it could not be read.
    """

    def __init__(self, needed: int, free: int | None, cause: str) -> None:
        self.needed = needed
        self.free = free
        mib = -(-needed >> 20)
        available = "an unknown amount is" if free is None else f"{free / 2**20:.1f} MiB are"
        super().__init__(
            f"shared memory is too small: a segment of {needed} bytes ({mib} MiB) is needed and "
            f"{available} free in /dev/shm ({cause}); "
            f"enlarge it (docker: --shm-size={_suggested(needed)} or --ipc=host)"
        )


def _suggested(needed: int) -> str:
    return f"{max(1, -(-needed * 2 >> 30))}g"


class LayoutMismatch(ShmError):
    """A descriptor holds something other than the layout that was expected."""


class Poisoned(ShmError):
    """The segment was given up by somebody; nothing may be written to it any more. `code` says why."""

    def __init__(self, layout: str, code: int) -> None:
        self.code = code
        super().__init__(f"{layout} is poisoned (code {code}): a peer is gone; wait for the next generation")


class RingStuck(ShmError):
    """A reader of a step ring is as many steps behind as the ring has slots.

    `reader` is its index, `done` the last step it finished, `behind` in steps, `stage` as its board line has
    it, `age` the seconds since the step it has not finished was committed.
    """

    def __init__(
        self, reader: int, done: int, behind: int, stage: str, age: float, silent: float | None
    ) -> None:
        self.reader = reader
        self.done = done
        self.behind = behind
        self.stage = stage
        self.age = age
        self.silent = silent
        heartbeat = "no heartbeat yet" if silent is None else f"last heartbeat {silent:.1f} s ago"
        super().__init__(
            f"step ring is full: reader {reader} is {behind} steps behind, its last finished step is {done}, "
            f"its stage {stage}, step {done + 1} is unfinished for {age:.1f} s ({heartbeat}); "
            "restart its cell"
        )


class TornRecord(ShmError):
    """A record's commit word is not the one that is due: it was overwritten or never written."""


class RecordTooLarge(ShmError):
    """A record is larger than this transport takes at any time, however empty it is."""


class ColumnMismatch(ShmError):
    """Columns of a table differ from its schema, or in length, or a frame does not hold what it claims."""


class SlabExhausted(ShmError):
    """No block that is large enough is free now; try again when readers have given some back."""


class BadHandle(ShmError):
    """A slab handle names no block of this pool, or a lease that has ended."""
