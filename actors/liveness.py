"""Who is alive: a child that dies with its parent, and a parent that sees a child begin to die.

A process closes its descriptors and becomes a zombie only after its memory is torn down, which takes hundreds
of milliseconds per resident gigabyte and longer with pinned memory. The kernel sets PF_EXITING before that,
so the flags in /proc/<pid>/stat (proc(5), field 9) tell of a death at once; waiting for a pid serves to reap.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import NamedTuple

__all__ = ["LifeSigns", "Watch", "die_with_parent", "signal_name"]

PF_EXITING = 0x4  # include/linux/sched.h
PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49  # fields 3, 9 and 52 of proc(5), counted behind the command's name


class LifeSigns(NamedTuple):
    """What one look at a process shows. `signal` is the number of the signal that ends it, 0 if unknown or
    none.
    """

    exiting: bool
    signal: int


_ALIVE = LifeSigns(False, 0)


class Watch:
    """A kept descriptor of a process's entry in /proc: a look costs about 6 us, and whoever gets the pid
    later is not taken for it. Raises OSError for a pid that is nobody's.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def look(self) -> LifeSigns:
        """The process as it is now; one that is gone altogether counts as exiting."""
        try:
            stat = os.pread(self._fd, 4096, 0)
        except ProcessLookupError:
            return LifeSigns(True, 0)
        rest = stat[stat.rindex(b")") + 2 :]
        fields = rest.split(None, _FLAGS + 1)  # no further: this runs forty times a second
        if fields[_STATE] not in (b"Z", b"X") and not int(fields[_FLAGS]) & PF_EXITING:
            return _ALIVE
        return LifeSigns(True, int(rest.split()[_EXIT_CODE]) & 0x7F)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that forked it ends; exit at once if it already
    has.

    `parent` is the pid that the parent gave to its child: a parent that died before the call leaves another
    one behind, and its signal would never come.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:
        os._exit(1)


def signal_name(number: int) -> str:
    """SIGKILL for 9; a number the platform has no name for stays a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
