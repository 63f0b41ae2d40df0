"""Calling the environment's own pip, and one sentence for each way it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tools.setup.checks import SetupError

# The first that matches the output tells what happened.
REASONS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full: make room and run this again."),
    (
        r"NewConnectionError|NameResolutionError|name resolution|ConnectTimeoutError|ReadTimeoutError"
        r"|Connection refused|Network is unreachable|ProxyError|SSLError|ConnectionResetError",
        "no package index could be reached: check the network, PIP_INDEX_URL and HTTPS_PROXY.",
    ),
    (r"Permission denied", "it may not write there: check who owns the folder of the environment."),
)


class Candidate(NamedTuple):
    """A file that pip would install."""

    name: str
    version: str
    url: str

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.url).path.rsplit("/", 1)[-1])


def explain(output: str, what: str) -> SetupError:
    """The sentence for a failed pip run, from what it printed."""
    for pattern, reason in REASONS:
        if re.search(pattern, output):
            return SetupError(f"pip could not install {what}, since {reason}")
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    lines = errors or [line for line in output.splitlines() if line.strip()]
    return SetupError(f"pip could not install {what}; it said: {lines[0] if lines else 'nothing'}")


class Pip:
    """The pip of the environment at `python`."""

    def __init__(self, python: Path) -> None:
        self._command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]

    def install(self, arguments: Sequence[str], what: str) -> None:
        """Install, with pip's own progress on a terminal and silence elsewhere. Raises SetupError."""
        loud = sys.stdout.isatty()
        command = [*self._command, "install", *([] if loud else ["--quiet"]), *arguments]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if loud else subprocess.PIPE,
            stderr=subprocess.PIPE if loud else subprocess.STDOUT,
            text=True,
        ) as process:
            stream = process.stderr if loud else process.stdout
            assert stream is not None
            said = []
            for line in stream:
                said.append(line)
                # A folder of wheels that is configured but absent is nothing to worry about.
                if loud and not line.startswith("WARNING: Location"):
                    sys.stderr.write(line)
        if process.returncode:
            raise explain("".join(said), what)

    def candidates(self, arguments: Sequence[str], what: str) -> list[Candidate]:
        """What `pip install arguments` would fetch, asked without fetching it. Raises SetupError."""
        command = [*self._command, "install", "--quiet", "--dry-run", "--report", "-", *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise explain(done.stderr, what)
        return [
            Candidate(item["metadata"]["name"], item["metadata"]["version"], item["download_info"]["url"])
            for item in json.loads(done.stdout)["install"]
        ]


def _size(candidate: Candidate) -> int | None:
    parts = urlsplit(candidate.url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        request = urllib.request.Request(candidate.url, method="HEAD")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def download_size(candidates: Iterable[Candidate]) -> int | None:
    """Bytes that these files take to fetch; None where a server does not tell."""
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(_size, candidates))
    return None if None in sizes else sum(size for size in sizes if size is not None)
