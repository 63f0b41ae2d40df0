"""What one request to a server and its answer looked like from the client."""

from __future__ import annotations

import msgspec

__all__ = ["Exchange"]


class Exchange(msgspec.Struct):
    """Times are seconds of one clock. ``due`` is when the schedule wanted the request sent.

    ``events`` are the times of the events that carried text, one per event; ``sizes`` are their tokens where
    the server tells them in every event, else empty. Tokens are the server's own usage, 0 when
    it told none. ``error`` is empty when the answer was complete. ``group`` names the part of the
    workload the request belongs to.
    """

    group: str
    due: float
    sent: float = 0.0
    ended: float = 0.0
    events: list[float] = msgspec.field(default_factory=list)
    sizes: list[int] = msgspec.field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from sending the request to its first token; None without one."""
        return self.events[0] - self.sent if self.events else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one text event and the next."""
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]

    @property
    def token_gaps(self) -> list[float]:
        """The gaps per token: an event of k tokens, where the server tells k, counts k times a k-th."""
        if not self.sizes:
            return self.gaps
        pairs = zip(self.gaps, self.sizes[1:], strict=True)
        return [gap / size for gap, size in pairs for _ in range(size)]
