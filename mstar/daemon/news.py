"""Telling whoever started the daemon how far it is."""

from __future__ import annotations

import contextlib
import os
import time

from mstar.config.launch import News, Progress, encode_news

__all__ = ["PipeNews"]

_APART = 0.2


class PipeNews:
    """News as lines of a pipe. Progress within a stage is thinned out; a reader may go away."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        os.set_inheritable(fd, False)
        self._stage = ("", "")
        self._told = 0.0

    def __call__(self, news: News) -> None:
        """Write ``news``; after the final piece the pipe is closed."""
        if self._fd is None:
            return
        if isinstance(news, Progress):
            now, stage = time.monotonic(), (news.actor, news.stage)
            if stage == self._stage and now - self._told < _APART and news.done != news.total:
                return
            self._stage, self._told = stage, now
        with contextlib.suppress(OSError):
            os.write(self._fd, encode_news(news))
        if not isinstance(news, Progress):
            os.close(self._fd)
            self._fd = None
