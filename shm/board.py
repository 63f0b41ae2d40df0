"""One line of shared memory per actor: whether it sleeps, when it last lived, what it is at."""

from __future__ import annotations

from typing import NamedTuple

from shm.errors import LayoutMismatch
from shm.segment import LINE_BYTES, Segment

__all__ = ["Board", "Line", "LineStatistics"]

_LAYOUT = "board"
# u64 indices into a line: the epoch has the first cache line to itself, producers read it with every record
_EPOCH, _BEAT, _STAGE, _STEP, _PID, _NAME = 0, 8, 9, 10, 11, 12
_NAME_BYTES = 32


class LineStatistics(NamedTuple):
    """A snapshot of a line; `beat` in monotonic nanoseconds."""

    asleep: bool
    beat: int
    stage: int
    stage_name: str
    step: int
    pid: int


class Line:
    """The line of one actor. That actor alone writes it, everybody reads it.

    `epoch` is odd while the actor sleeps; `beat` its last heartbeat (time.monotonic_ns); `stage` a code that
    the runtime defines; `step` the step it is at; `stage_name` the stage in words (32 bytes of UTF-8).
    """

    __slots__ = ("_name", "index", "offset", "words")

    def __init__(self, segment: Segment, index: int) -> None:
        self.index = index
        start = LINE_BYTES * (1 + index)
        self.words = segment.words
        self.offset = start // 8  # u64 index of the epoch in `words`
        self._name = segment.buf[start + 8 * _NAME : start + 8 * _NAME + _NAME_BYTES]

    @property
    def epoch(self) -> int:
        return self.words[self.offset + _EPOCH]

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.words[self.offset + _EPOCH] = value

    @property
    def beat(self) -> int:
        return self.words[self.offset + _BEAT]

    @beat.setter
    def beat(self, value: int) -> None:
        self.words[self.offset + _BEAT] = value

    @property
    def stage(self) -> int:
        return self.words[self.offset + _STAGE]

    @stage.setter
    def stage(self, value: int) -> None:
        self.words[self.offset + _STAGE] = value

    @property
    def step(self) -> int:
        return self.words[self.offset + _STEP]

    @step.setter
    def step(self, value: int) -> None:
        self.words[self.offset + _STEP] = value

    @property
    def pid(self) -> int:
        return self.words[self.offset + _PID]

    @pid.setter
    def pid(self, value: int) -> None:
        self.words[self.offset + _PID] = value

    @property
    def stage_name(self) -> str:
        """Words for people: a reader may see half of the old and half of the new one."""
        return bytes(self._name).rstrip(b"\0").decode(errors="replace")

    @stage_name.setter
    def stage_name(self, value: str) -> None:
        text = value.encode()[:_NAME_BYTES].decode(errors="ignore").encode()
        self._name[:] = text.ljust(_NAME_BYTES, b"\0")

    def statistics(self) -> LineStatistics:
        return LineStatistics(
            bool(self.epoch & 1), self.beat, self.stage, self.stage_name, self.step, self.pid
        )


class Board:
    """`n` lines of 128 bytes, one per actor of the house."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.n = segment.words[0]
        if LINE_BYTES * (1 + self.n) > segment.nbytes:
            raise LayoutMismatch(f"board claims {self.n} lines in {segment.nbytes} bytes: it was overwritten")

    @classmethod
    def create(cls, n: int, *, generation: int = 1) -> Board:
        if n < 1:
            raise ValueError(f"a board needs at least one line, not {n}")
        segment = Segment.create(LINE_BYTES * (1 + n), _LAYOUT, generation=generation)
        segment.words[0] = n
        return cls(segment)

    @classmethod
    def attach(cls, fd: int) -> Board:
        return cls(Segment.attach(fd, _LAYOUT))

    def line(self, i: int) -> Line:
        if not 0 <= i < self.n:
            raise IndexError(f"line {i} of a board of {self.n}: allowed are 0 to {self.n - 1}")
        return Line(self.segment, i)

    def close(self) -> None:
        self.segment.close()
