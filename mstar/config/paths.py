"""Where a daemon of this user is found: the default Unix socket, and whether its folder can be trusted.

Server and client compute the same path from the same facts.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["UntrustedFolder", "check_private", "default_log", "default_socket", "lock_file", "lock_owner"]


class UntrustedFolder(Exception):
    """The folder of a socket belongs to somebody else, or others may write to it."""


def default_socket(env: Mapping[str, str]) -> Path:
    """``$XDG_RUNTIME_DIR/mstar/mstar.sock`` if that folder is ours, else in /tmp/mstar-UID."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isabs(runtime):
        try:
            if os.stat(runtime).st_uid == os.geteuid():
                return Path(runtime, "mstar", "mstar.sock")
        except OSError:
            pass
    return Path(tempfile.gettempdir(), f"mstar-{os.geteuid()}", "mstar.sock")


def default_log(env: Mapping[str, str]) -> Path:
    """Where a background daemon on the default socket writes its log."""
    state = env.get("XDG_STATE_HOME", "")
    base = Path(state) if state and os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "mstar" / "mstar.log"


def lock_file(socket: Path) -> Path:
    """The file whose lock is held by the daemon that serves ``socket``; it holds that daemon's process id."""
    return socket.with_name(socket.name + ".lock")


def lock_owner(socket: Path) -> int | None:
    """Process id of the daemon that holds the lock of ``socket``; None when no daemon does."""
    try:
        fd = os.open(lock_file(socket), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)
    return None


def check_private(folder: Path) -> None:
    """Raise UntrustedFolder unless ``folder`` is a real directory of this user that no one else may write to.

    A folder in a directory that all may write to could have been put there, as a link or a
    directory, by someone who wants to be taken for the server. Raises OSError when it is missing.
    """
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise UntrustedFolder(f"{folder} is not a real directory; remove it, or choose a socket with --uds")
    if found.st_uid != os.geteuid():
        raise UntrustedFolder(
            f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}; choose a socket with --uds"
        )
    if found.st_mode & 0o022:
        raise UntrustedFolder(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}, so others may write to it; "
            f"allowed is 0700: run chmod 700 {folder}"
        )
