"""`python -m mstar.daemon`: a daemon for a starter that gives its order on standard input and reads news."""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from mstar.config.launch import Launch
from mstar.daemon.log import configure
from mstar.daemon.news import PipeNews
from mstar.daemon.serve import Daemon


def main() -> int:
    """Read a Launch from standard input and serve it."""
    parser = argparse.ArgumentParser(prog="python -m mstar.daemon", description=main.__doc__)
    parser.add_argument("--news", type=int, metavar="FD", help="descriptor that takes the news as JSON lines")
    news = parser.parse_args().news
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    configure(order.deployment.log_level, order.deployment.log_format)
    tell = PipeNews(news) if news is not None else lambda news: None
    return Daemon(order.deployment, news=tell, parent=order.parent).run()


if __name__ == "__main__":
    sys.exit(main())
