"""The listening sockets: bound before anything is spawned, inherited by gateways, kept when one restarts."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mstar.config.paths import UntrustedFolder, default_socket
from mstar.config.schema import Listen
from mstar.daemon.paths import LONGEST_PATH, InUse, SocketLock, private_folder

__all__ = ["CannotListen", "InUse", "Sockets", "port_holder"]

BACKLOG = 1024
# How long the socket of a killed daemon may take to close with its last child, in seconds.
_DYING = 2.0


class CannotListen(Exception):
    """An address or path cannot be listened on."""


class Sockets:
    """The sockets of one daemon, listening from the start so that early connections wait instead of failing.

    Raises InUse or CannotListen; nothing is left behind then.
    """

    def __init__(self, listen: Listen, env: Mapping[str, str]) -> None:
        self.path = Path(os.path.abspath(listen.uds)) if listen.uds else default_socket(env)
        self.tcp: socket.socket | None = None
        self._lock = _lock(self.path, default=listen.uds is None)
        try:
            if listen.tcp:
                self.tcp = _listen_tcp(listen.host, listen.port)
            self.uds = _listen_unix(self.path)
        except BaseException:
            if self.tcp is not None:
                self.tcp.close()
            self._lock.release()
            raise
        made = os.stat(self.path)
        self._inode = (made.st_dev, made.st_ino)

    @property
    def port(self) -> int | None:
        """The TCP port in use, also where port 0 was asked for."""
        return None if self.tcp is None else int(self.tcp.getsockname()[1])

    @property
    def url(self) -> str | None:
        """Where HTTP clients of this host find the server; None without TCP."""
        if self.tcp is None:
            return None
        host, port = self.tcp.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Close both and remove the Unix socket, if it is still ours, and its lock."""
        if self.tcp is not None:
            self.tcp.close()
        self.uds.close()
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            pass
        else:
            if (found.st_dev, found.st_ino) == self._inode:
                self.path.unlink()
        self._lock.release()

    def __enter__(self) -> Sockets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(path: Path, *, default: bool) -> SocketLock:
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise CannotListen(
            f"the path of the Unix socket {path} is {len(os.fsencode(path))} bytes long; at most "
            f"{LONGEST_PATH} are allowed: choose a shorter one with --uds"
        )
    try:
        if default:
            private_folder(path.parent)
        return SocketLock(path)
    except UntrustedFolder as error:
        raise CannotListen(str(error)) from error
    except OSError as error:
        raise CannotListen(
            f"the Unix socket {path} cannot be made: {error.strerror} ({error.filename}); "
            "choose a socket in a folder that exists and is yours with --uds"
        ) from error


def _listen_unix(path: Path) -> socket.socket:
    """Bind ``path`` with mode 0600; the caller holds its lock, so what is there is stale or not ours."""
    deadline = time.monotonic() + _DYING
    while not _vacant(path):
        if time.monotonic() > deadline:
            raise InUse(f"the Unix socket {path} is in use by another program; choose another one with --uds")
        time.sleep(0.02)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"the Unix socket {path} cannot be made: {error.strerror}") from error
    return listener


def _vacant(path: Path) -> bool:
    """Whether nothing listens at ``path``; a socket that refuses connections is removed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return True
    if not stat.S_ISSOCK(mode):
        raise CannotListen(f"{path} exists and is not a socket; remove it, or choose a socket with --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT):
                raise CannotListen(f"{path} cannot be looked at: {error.strerror}") from error
    return False


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: no name that DNS could carry
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise CannotListen(
            f"the host {host!r} is no address of this machine ({why}); "
            "allowed are addresses such as 127.0.0.1 or 0.0.0.0"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # Lets a restart have the port while old connections of the last server still time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = port_holder(port)
            raise InUse(
                f"the port {port} of {host} is in use{f' by {holder}' if holder else ''}; "
                "stop that server, or choose another port with --port (0 takes a free one)"
            ) from error
        raise CannotListen(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def port_holder(port: int) -> str | None:
    """ "process 123 (name)" that listens on TCP ``port``, as far as this user may see it."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    holders: dict[int, tuple[int, str]] = {}
    for process in Path("/proc").iterdir() if inodes else ():
        if not process.name.isdigit():
            continue
        try:
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
                holders[int(process.name)] = int(rest.split()[1]), name
        except OSError:
            continue
    # Children inherit a socket; the one to be stopped is the one that nobody handed it to.
    for pid, (parent, name) in holders.items():
        if parent not in holders:
            return f"process {pid} ({name})"
    return None
