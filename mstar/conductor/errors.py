"""Why a request could not be placed."""

from __future__ import annotations

__all__ = ["NoDecider", "Overloaded", "UnknownDecider"]


class Overloaded(Exception):
    """Every ready decider serves as many requests as it may."""

    def __init__(self, live: int, capacity: int) -> None:
        super().__init__(
            f"{live} requests are being served; at most {capacity} are allowed. Try again a little later."
        )
        self.live = live
        self.capacity = capacity


class NoDecider(Exception):
    """No decider is ready: it is starting, or being restarted."""

    def __init__(self) -> None:
        super().__init__("The model is not ready to serve; try again a little later.")


class UnknownDecider(Exception):
    """A decider was named that does not exist."""

    def __init__(self, decider: int, count: int) -> None:
        super().__init__(f"Decider {decider} does not exist; there are deciders 0 to {count - 1}.")
