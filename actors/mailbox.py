"""From a ring to a handler: decode what has arrived, a bounded number of records at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from actors.errors import MalformedMessage
from shm.errors import ShmError
from shm.ring import RingReader

__all__ = ["Decoder", "Mailbox", "MailboxStatistics"]

_log = logging.getLogger(__name__)

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)


class Decoder(Protocol[M_co]):
    """What turns a record into a message: a msgspec Decoder, or a Table of shm.codec."""

    def decode(self, buf: memoryview, /) -> M_co: ...


class MailboxStatistics(NamedTuple):
    """Messages handled and records that did not decode."""

    handled: int
    malformed: int


class Mailbox(Generic[M]):
    """One inbox with its message type.

    A record that does not decode is skipped, counted, and given to `on_error` (which logs by default): the
    sender's mistake must not end the receiver. What the handler raises is the receiver's own and propagates.
    """

    def __init__(
        self,
        reader: RingReader,
        decoder: Decoder[M],
        handler: Callable[[M], None],
        *,
        name: str = "",
        on_error: Callable[[MalformedMessage], None] | None = None,
    ) -> None:
        self.reader = reader
        self.name = name
        self._decode = decoder.decode
        self._handler = handler
        self._on_error = on_error or self._log_error
        self._handled = 0
        self._malformed = 0

    def drain(self, limit: int = 64) -> bool:
        """Handle up to `limit` records; True if more are there.

        A message's views into the ring (decoded columns, memoryview fields) are valid only within the
        handler.
        """
        reader = self.reader
        for _ in range(limit):
            record = reader.peek()
            if record is None:
                return False
            try:
                message = self._decode(record)
            except (msgspec.DecodeError, ShmError, ValueError) as error:
                size = record.nbytes
                reader.release()
                self._malformed += 1
                self._on_error(
                    MalformedMessage(
                        f"record of {size} bytes in mailbox {self.name!r} does not decode: {error}"
                    )
                )
                continue
            try:
                self._handler(message)
            finally:
                reader.release()
            self._handled += 1
        return reader.has_data()

    def rebind(self, reader: RingReader) -> None:
        """Read from a ring of a later generation from now on."""
        self.reader = reader

    def statistics(self) -> MailboxStatistics:
        return MailboxStatistics(self._handled, self._malformed)

    def _log_error(self, error: MalformedMessage) -> None:
        # At powers of two only: a peer that sends nothing else must not fill the disk.
        if self._malformed & (self._malformed - 1) == 0:
            _log.warning("%s (%d so far)", error, self._malformed)
