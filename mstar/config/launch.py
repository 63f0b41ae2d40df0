"""What a starter tells a daemon that it spawns, and what the daemon tells back until it is ready."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar.config.schema import Deployment

__all__ = ["Failed", "Launch", "Progress", "Ready", "decode_news", "encode_news"]


class Launch(msgspec.Struct, frozen=True):
    """Sent as JSON on the daemon's standard input, so that no key is seen in a list of processes.

    ``parent`` is a process whose end ends the daemon at once, or None. ``sources`` are those of the
    resolved configuration.
    """

    deployment: Deployment
    sources: dict[str, str] = {}
    parent: int | None = None


class Progress(msgspec.Struct, frozen=True, tag="stage"):
    """A stage of the start was entered or moved on; ``done`` of ``total`` units where it can be counted."""

    actor: str
    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The daemon serves."""

    pid: int
    socket: str
    url: str | None
    model: str
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The daemon gave up; ``cause`` is one sentence."""

    cause: str


News = Progress | Ready | Failed
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(News)


def encode_news(news: News) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(news) + b"\n"


def decode_news(line: bytes) -> News:
    """The news of one line; raises msgspec.DecodeError when it is malformed."""
    news: News = _decoder.decode(line)
    return news
