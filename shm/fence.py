"""A full memory barrier for plain Python, and the refusal to run where there is none.

A processor may let a load overtake an earlier store to another address, so "publish, then look whether the
peer sleeps" and "announce sleep, then look for work" can miss each other. Taking and releasing an
uncontended lock is a lock-prefixed read-modify-write on x86-64, which orders the two. On other processors
a lock does not, and plain memoryview stores carry no order either.
"""

from __future__ import annotations

import os
import sys
import threading

from shm.errors import UnsupportedPlatform

__all__ = ["fence", "require_platform"]

_lock = threading.Lock()
_acquire = _lock.acquire
_release = _lock.release


def fence() -> None:
    """Order every store before it before every load after it, as other processes see them.

    The acquire blocks: a failed try-lock executes no locked instruction and would order nothing.
    """
    _acquire()
    _release()


def require_platform(
    system: str | None = None, machine: str | None = None, word_bits: int | None = None
) -> None:
    """Raise UnsupportedPlatform on anything but 64-bit Linux on x86-64; the arguments default to this one."""
    system = sys.platform if system is None else system
    machine = os.uname().machine if machine is None else machine
    word_bits = sys.maxsize.bit_length() + 1 if word_bits is None else word_bits
    if system != "linux" or machine not in ("x86_64", "amd64") or word_bits != 64:
        raise UnsupportedPlatform(
            f"shared-memory rings need Linux on x86-64, this is {system} on {machine} ({word_bits} bit): "
            "run on an x86-64 Linux host"
        )
