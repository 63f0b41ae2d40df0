"""What the ranks of a cell settle before they load: that they were told the same, and how they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from mstar.distributed.matmul import Layout
from mstar.distributed.rendezvous import Rendezvous
from mstar.model.choose import CpuChoice

__all__ = ["ConfigMismatch", "check_alike", "model_identity", "settle_choice"]


class ConfigMismatch(Exception):
    """A rank was told otherwise than the leader of its cell. It must not start: it would run other steps."""

    def __init__(self, rank: int, what: str, told: str, leaders: str) -> None:
        super().__init__(
            f"the {what} of rank {rank} is {told}, that of its leader, rank 0, is {leaders}; "
            "all ranks of a cell take the same: start them from one deployment"
        )
        self.rank, self.what, self.told, self.leaders = rank, what, told, leaders


class _Choice(msgspec.Struct, frozen=True):
    dtype: str
    threads: int
    layout: Layout


def settle_choice(rendezvous: Rendezvous, choice: CpuChoice | None) -> CpuChoice:
    """Rank 0's choice of dtype, threads and layout, which every rank takes: none measures for itself.

    ``choice`` None on the other ranks. Raises PeerMissing.
    """
    words = None
    if choice is not None:
        name = str(choice.dtype).removeprefix("torch.")
        words = msgspec.json.encode(_Choice(name, choice.threads, choice.layout)).decode()
    settled = msgspec.json.decode(rendezvous.settle("choice", words), type=_Choice)
    return CpuChoice(getattr(torch, settled.dtype), settled.threads, settled.layout)


def check_alike(rendezvous: Rendezvous, facts: Mapping[str, str]) -> None:
    """Compare ``facts`` (what it is -> its value or digest) over all ranks.

    Raises ConfigMismatch on every rank, for the first rank and fact that differ from rank 0's, and
    PeerMissing.
    """
    told = rendezvous.share("facts", msgspec.json.encode(dict(facts)).decode())
    leaders, *others = (msgspec.json.decode(words, type=dict[str, str]) for words in told)
    for rank, found in enumerate(others, 1):
        for what in sorted(leaders.keys() | found.keys()):
            ours, theirs = found.get(what, "none"), leaders.get(what, "none")
            if ours != theirs:
                raise ConfigMismatch(rank, what, ours, theirs)


def model_identity(directory: Path) -> str:
    """32 hexadecimal digits over the names, sizes and dates of a model's files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        found = path.stat()
        digest.update(f"{path.name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()
