"""Where the ranks of a cell meet before they have a collective: a file that all of them have open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from mstar.distributed.errors import PeerMissing
from mstar.distributed.shard import Shard

__all__ = ["Rendezvous"]


class Rendezvous:
    """Words that ranks tell each other at the start, and the store that a collective library connects by.

    `path` names a file that every rank of the group opens: /proc/self/fd/N of an inherited memfd leaves no
    name behind. `round` sets one start of the group apart from the earlier ones in the same file: a
    restarted cell never meets a dead one's words. `timeout` in seconds bounds every wait for a peer.
    The descriptor stays open as long as the process: the store opens the path again when it is collected.
    """

    def __init__(self, path: str, shard: Shard, *, round: int = 1, timeout: float = 300.0) -> None:
        self.shard = shard
        self.timeout = timeout
        file = FileStore(path, -1)  # no number of members: none of them may remove the file
        file.set_timeout(timedelta(seconds=timeout))
        self._store = PrefixStore(f"round {round}", file)
        self._topics: set[str] = set()

    def share(self, topic: str, words: str) -> list[str]:
        """What every rank says on `topic`, in rank order; each says something once. Raises PeerMissing."""
        self._say(topic, words)
        return [self._hear(topic, rank) for rank in range(self.shard.world)]

    def settle(self, topic: str, words: str | None) -> str:
        """What rank 0 says on `topic`; the others' `words` do not count. Raises PeerMissing."""
        if self.shard.rank == 0:
            if words is None:
                raise ValueError(f"rank 0 settles {topic!r}, so it has to say something")
            self._say(topic, words)
            return words
        return self._hear(topic, 0)

    def store(self, name: str) -> Store:
        """A part of the store for a collective library."""
        return PrefixStore(name, self._store)

    def _say(self, topic: str, words: str) -> None:
        if topic in self._topics:
            raise ValueError(f"rank {self.shard.rank} has said something on {topic!r} already")
        self._topics.add(topic)
        self._store.set(f"{topic}/{self.shard.rank}", words)

    def _hear(self, topic: str, rank: int) -> str:
        with self.bounded(f"rank {rank} says nothing on {topic!r}"):
            return self._store.get(f"{topic}/{rank}").decode()

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """Turn a time-out of the store or of a connection inside into PeerMissing."""
        try:
            yield
        except RuntimeError as error:  # what the library raises for either
            raise PeerMissing(
                f"{what} within {self.timeout:g} s (rank {self.shard.rank} of {self.shard.world} waited): "
                "see its own log lines for what keeps it, or raise --stage-timeout"
            ) from error
