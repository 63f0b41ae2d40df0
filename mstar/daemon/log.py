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


class _Text(logging.Formatter):
    """2026-01-31T12:00:00.000Z INFO rank/0 loaded weights seconds=1.2; then a traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        actor = getattr(record, "actor", "daemon")
        fields = getattr(record, "fields", {})
        parts = [_stamp(record.created), record.levelname, actor, record.getMessage()]
        parts += [f"{name}={_value(value)}" for name, value in fields.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "actor": getattr(record, "actor", "daemon"),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def configure(level: str, form: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send every log line of this process to ``stream`` (standard error) in the form asked for."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log(level: int, message: str, *, actor: str = "daemon", **fields: object) -> None:
    """One line about ``actor``; ``fields`` are appended as key=value, or stand in the JSON object."""
    _logger.log(level, message, extra={"actor": actor, "fields": fields})
