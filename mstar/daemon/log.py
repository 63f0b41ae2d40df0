"""Log lines: one an event, for people or as JSON, each with the name of the actor it is about."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Literal, TextIO

import msgspec

__all__ = ["configure", "log"]

_logger = logging.getLogger("mstar.daemon")


def _stamp(created: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{whole}.{int(created % 1 * 1000):03d}Z"


def _value(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return msgspec.json.encode(text).decode() if not text or any(c in text for c in ' "=\n') else text


class _Line(logging.Formatter):
    def __init__(self, actor: str) -> None:
        super().__init__()
        self.actor = actor


class _Text(_Line):
    """2026-01-31T12:00:00.000Z INFO rank/0 loaded weights seconds=1.2; then a traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        actor = getattr(record, "actor", self.actor)
        fields = getattr(record, "fields", {})
        parts = [_stamp(record.created), record.levelname, actor, record.getMessage()]
        parts += [f"{name}={_value(value)}" for name, value in fields.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(_Line):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "actor": getattr(record, "actor", self.actor),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def configure(
    level: str, form: Literal["text", "json"], *, actor: str = "daemon", stream: TextIO | None = None
) -> None:
    """Send every log line of this process, which is ``actor``, to ``stream`` (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json(actor) if form == "json" else _Text(actor))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log(level: int, message: str, *, actor: str | None = None, **fields: object) -> None:
    """One line about ``actor`` (this process), with ``fields`` as key=value or in the JSON object."""
    about = {} if actor is None else {"actor": actor}
    _logger.log(level, message, extra={**about, "fields": fields})
