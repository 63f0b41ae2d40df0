"""An eventfd that wakes one sleeper."""

from __future__ import annotations

import contextlib
import os

__all__ = ["Doorbell"]


class Doorbell:
    """A counter in the kernel: readable while rung and not yet drained. Any number of processes may ring it.

    It says only "look again": what there is to do stands in shared memory, so one ring too many is harmless.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    @classmethod
    def attach(cls, fd: int) -> Doorbell:
        """Take ownership of an inherited or received descriptor."""
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        return cls(fd)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is at its maximum: it is rung already
            os.eventfd_write(self.fd, 1)

    def drain(self) -> int:
        """Make it silent; returns how often it was rung since the last drain."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
