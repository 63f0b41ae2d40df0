"""Aligned columns and a line that shows progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["ProgressLine", "print_table"]

_WIDTH = 24


def print_table(rows: Sequence[Sequence[object]], *, indent: str = "") -> None:
    """Print rows with their columns aligned to the left; the first row is the head."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    for row in texts:
        print(
            (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        )


class ProgressLine:
    """On a terminal one line that is redrawn; elsewhere a line when a stage begins and when it is done."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._stage = ""
        self._drawn = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` units (bytes where they are large) of ``stage``; total 0 where unknown."""
        if self._terminal:
            self._draw(stage, done, total)
        elif stage != self._stage:
            print(stage, file=self._stream, flush=True)
        self._stage = stage

    def _draw(self, stage: str, done: int, total: int) -> None:
        line = stage
        if total:
            filled = done * _WIDTH // total
            line += f" [{'#' * filled}{'.' * (_WIDTH - filled)}] {done * 100 // total:3d} %"
            if total >= 1 << 20:
                line += f" of {total / 1e6:.0f} MB"
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
        self._drawn = True

    def clear(self) -> None:
        """Leave the terminal's line empty for what is printed next."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False
