"""Invariants between ranks and towards clients, checked from outside.

``RankAudit`` compares ranks, ``ClientAudit`` what clients got with what was due; plans have their own file.
"""

from __future__ import annotations

from mstar.messages.tokens import ERROR

__all__ = ["Broken", "ClientAudit", "RankAudit"]


class Broken(Exception):
    """An invariant does not hold; ``rule`` names it."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class RankAudit:
    """Equal plans and equal state on every rank after every step, and no step skipped."""

    def __init__(self, ranks: int) -> None:
        self._at = [0] * ranks
        self._seen: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self._ranks = ranks

    def ran(self, rank: int, seq: int, signature: tuple[int, ...]) -> None:
        """``rank`` has launched step ``seq``, after which it has this ``signature``. Raises Broken.

        A rank outside the group of the step's node keeps its tables alone: its signature is shorter.
        """
        if seq != self._at[rank] + 1:
            raise Broken("order", f"rank {rank} runs step {seq} after step {self._at[rank]}")
        self._at[rank] = seq
        if self._ranks == 1:
            return
        seen = self._seen.get(seq)
        if seen is None:
            self._seen[seq] = rank, signature, 1
            return
        first, expected, count = seen
        common = min(len(signature), len(expected))
        if signature[:common] != expected[:common]:
            fields = ("digest", "tables", "carries", "log")
            field = next(
                name for name, mine, other in zip(fields, signature, expected, strict=False) if mine != other
            )
            raise Broken("ranks", f"step {seq}: the {field} of ranks {first} and {rank} differ")
        if count + 1 == self._ranks:
            del self._seen[seq]
        else:
            self._seen[seq] = first, max(expected, signature, key=len), count + 1

    def idle(self) -> None:
        """Every rank has run every step."""
        if len(set(self._at)) > 1:
            raise Broken("idle", f"ranks are idle at steps {self._at}")


class ClientAudit:
    """Each request ends once; each token is the one due at its index."""

    def __init__(self) -> None:
        self.got: dict[int, int] = {}
        self.ends: dict[int, int] = {}

    def opened(self, sequence: int) -> None:
        """A client waits for ``sequence``."""
        self.got[sequence] = 0

    def token(self, sequence: int, index: int, token: int, due: int) -> None:
        """A token was delivered. Raises Broken."""
        if sequence in self.ends:
            raise Broken("after the end", f"sequence {sequence} got token {index} after it had ended")
        if index != self.got[sequence]:
            raise Broken("index", f"sequence {sequence} got token {index}, due is {self.got[sequence]}")
        if token != due:
            raise Broken("token", f"sequence {sequence} got {token} at {index}, due is {due}")
        self.got[sequence] = index + 1

    def ended(self, sequence: int, finish: int, due: int | None) -> None:
        """``sequence`` has ended; ``due`` is the number of tokens owed, None where it failed."""
        if sequence in self.ends:
            raise Broken("end", f"sequence {sequence} ended twice")
        self.ends[sequence] = finish
        if finish != ERROR and self.got[sequence] != due:
            raise Broken("end", f"sequence {sequence} ended with {self.got[sequence]} of {due} tokens")

    def finished(self) -> None:
        """Nobody waits any more. Raises Broken."""
        waiting = self.got.keys() - self.ends.keys()
        if waiting:
            raise Broken("end", f"sequence {min(waiting)} never ended")
