"""Frames and descriptors over a SOCK_SEQPACKET unix socket pair: one datagram is one frame.

Descriptors of replaced segments reach living processes here (SCM_RIGHTS, unix(7)). Sending never blocks: what
the kernel does not take waits in a queue with a bound, or, for status, in a table that keeps the latest per
key.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from actors.errors import ControlClosed, ControlCongested, FrameTooLarge

__all__ = ["MAX_FRAME", "ControlSocket", "ControlStatistics", "control_pair"]

MAX_FRAME = (
    128 * 1024
)  # bytes; below the default net.core.wmem_max of 208 KiB, so one always fits an empty socket
MAX_DESCRIPTORS = 253  # SCM_MAX_FD
_BURST = 32  # frames read per callback, so that one talkative peer cannot hold the loop
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)

In = TypeVar("In")


class ControlStatistics(NamedTuple):
    """Frames sent and received, status frames overwritten before they left, and frames waiting now."""

    sent: int
    received: int
    superseded: int
    waiting: int


class ControlSocket(Generic[In]):
    """One end of a control connection: sends any frame, receives frames of the type `frames`.

    `send` and `post` may be called from any thread, everything else from the thread of the loop.
    """

    def __init__(self, sock: socket.socket, frames: Any, *, bound: int = 256) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(frames)
        self._bound = bound
        self._lock = threading.Lock()
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._latest: dict[str, bytes] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing = False
        self._sent = self._received = self._superseded = 0
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frame: Callable[[In, list[int]], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Have `loop` deliver every frame with its descriptors, which are the receiver's to close."""

        def readable() -> None:
            try:
                for _ in range(_BURST):
                    if self.closed:
                        return
                    received = self.receive()
                    if received is None:
                        return
                    on_frame(*received)
            except ControlClosed:
                loop.remove_reader(self._sock)
                on_closed()

        self._loop = loop
        loop.add_reader(self._sock, readable)
        self._flush()

    def receive(self) -> tuple[In, list[int]] | None:
        """The next frame and its descriptors, None if there is none yet. Raises ControlClosed at the end."""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(MAX_FRAME, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ControlClosed(f"the control socket broke: {error}") from error
        descriptors = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
        if not data:
            raise ControlClosed("the other end of the control socket is closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ControlClosed(
                f"a control frame arrived cut (flags {flags:#x}); is the descriptor limit reached?"
            )
        self._received += 1
        return self._decoder.decode(data), descriptors.tolist()

    def wait_readable(self, timeout: float) -> In:
        """Block for the next frame; only for a process whose loop does not run yet. Raises ControlClosed."""
        self._sock.settimeout(timeout)
        try:
            received = self.receive()
        finally:
            self._sock.setblocking(False)
        if received is None:
            raise ControlClosed(f"no control frame arrived within {timeout:g} s")
        return received[0]

    def send(self, frame: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send a frame, or queue it if the kernel's buffer is full; a frame to a peer that is gone is
        dropped.

        Raises FrameTooLarge, and ControlCongested when the queue is at its bound.
        """
        data = self._encode(frame)
        with self._lock:
            if not self._queue and not self._latest and self._transmit(data, descriptors):
                return
            if self.closed:
                return
            if len(self._queue) >= self._bound:
                raise ControlCongested(
                    f"{len(self._queue)} control frames wait for a peer that does not read them; "
                    f"the bound is {self._bound}"
                )
            # The sender may close its descriptors as soon as this call returns.
            self._queue.append((data, [os.dup(fd) for fd in descriptors]))
        self._want_write()

    def post(self, key: str, frame: msgspec.Struct) -> None:
        """Send a frame of which only the latest per key matters: a waiting one is replaced."""
        data = self._encode(frame)
        with self._lock:
            if not self._queue and not self._latest and self._transmit(data, ()):
                return
            if self.closed:
                return
            self._superseded += key in self._latest
            self._latest[key] = data
        self._want_write()

    def send_last(self, frame: msgspec.Struct, timeout: float) -> None:
        """Send what waits and then `frame`, blocking for `timeout` seconds at most: the process ends after
        it.
        """
        self._sock.settimeout(timeout)
        with contextlib.suppress(OSError), self._lock:
            for data, descriptors in self._queue:
                socket.send_fds(self._sock, [data], descriptors)
            for data in self._latest.values():
                self._sock.send(data)
            self._sock.send(self._encode(frame))

    def close(self) -> None:
        """Close this end. Waiting frames are dropped."""
        if self._loop is not None and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        with self._lock:
            self._drop()
        self._sock.close()

    def statistics(self) -> ControlStatistics:
        return ControlStatistics(
            self._sent, self._received, self._superseded, len(self._queue) + len(self._latest)
        )

    def _encode(self, frame: msgspec.Struct) -> bytes:
        data = self._encoder.encode(frame)
        if len(data) > MAX_FRAME:
            raise FrameTooLarge(
                f"a control frame {type(frame).__name__} of {len(data)} bytes exceeds {MAX_FRAME}; "
                "payloads of this size belong into a slab or a file"
            )
        return data

    def _transmit(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """One datagram into the kernel; False if it has no room, or if the peer is gone (`closed` is set)."""
        if self.closed:
            return False
        try:
            socket.send_fds(self._sock, [data], list(descriptors))
        except BlockingIOError:
            return False
        except OSError:
            self._drop()
            return False
        self._sent += 1
        return True

    def _drop(self) -> None:
        self.closed = True
        for _, descriptors in self._queue:
            for fd in descriptors:
                os.close(fd)
        self._queue.clear()
        self._latest.clear()

    def _want_write(self) -> None:
        if self._loop is not None:
            # From another thread the loop may have been closed meanwhile: then nobody waits for the frame.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            while self._queue:
                data, descriptors = self._queue[0]
                if not self._transmit(data, descriptors):
                    break
                self._queue.popleft()
                for fd in descriptors:
                    os.close(fd)
            while self._latest and not self._queue:
                key = next(iter(self._latest))
                if not self._transmit(self._latest[key], ()):
                    break
                del self._latest[key]
            waiting = bool(self._queue or self._latest)
        if self._loop is None or waiting == self._writing or self._sock.fileno() < 0:
            return
        self._writing = waiting
        if waiting:
            self._loop.add_writer(self._sock, self._flush)
        else:
            self._loop.remove_writer(self._sock)


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; the second is for a child to inherit."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
