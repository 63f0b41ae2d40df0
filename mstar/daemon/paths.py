"""Folders and the lock of a daemon: made where they are missing, refused where they are not to be trusted."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from mstar.config.paths import check_private, lock_file

__all__ = ["InUse", "SocketLock", "private_folder"]

# A Unix socket's path must fit sockaddr_un with its closing zero.
LONGEST_PATH = 107


class InUse(Exception):
    """A port or socket is served by somebody else."""


def private_folder(folder: Path) -> None:
    """Make ``folder`` with mode 0700 where it is missing. Raises UntrustedFolder (see check_private)."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check_private(folder)


class SocketLock:
    """Held for as long as a daemon lives: two starts on one socket race for it, and a kill frees it."""

    def __init__(self, socket: Path) -> None:
        """Take the lock. Raises InUse, naming the socket and the process that holds it."""
        self._path = lock_file(socket)
        while True:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
                os.close(self._fd)
                by = f" by process {text}" if text.isdigit() else ""
                raise InUse(
                    f"the Unix socket {socket} is in use{by}; stop that server with "
                    f"mstar stop --uds {socket}, or choose another socket with --uds"
                ) from None
            if self._is_current():
                break
            os.close(self._fd)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _is_current(self) -> bool:
        """Whether the locked file is still the one at its path: its last holder may just have removed it."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._fd)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Remove the file, then let go of the lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
