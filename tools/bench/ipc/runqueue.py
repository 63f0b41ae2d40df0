"""How long processes waited for a core (proc(5), schedstat: the second figure, in nanoseconds)."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["RunQueue"]


class RunQueue:
    """All threads that these processes have now; files stay open, a look costs some microseconds."""

    def __init__(self, pids: list[int]) -> None:
        paths = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        self._fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
        self._last = self._total()

    def _total(self) -> int:
        return sum(int(os.pread(fd, 64, 0).split()[1]) for fd in self._fds)

    def delay(self) -> int:
        """Nanoseconds that the threads have waited since the last call, together."""
        total = self._total()
        waited, self._last = total - self._last, total
        return waited

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
