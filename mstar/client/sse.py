"""Server-sent events as OpenAI's API uses them; no I/O."""

from __future__ import annotations

__all__ = ["EventReader"]


class EventReader:
    """Cuts a byte stream into the ``data`` of its events; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ``data`` completes."""
        self._buffer += data
        events: list[bytes] = []
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(bytes(line[5:].removeprefix(b" ")))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
