"""What several test folders share: bounded waits, a tiny model, the leak guard and the list of behaviours.

Nothing here knows a room of the engine; a fake that stands in for one lives beside the tests of that room.
"""

from __future__ import annotations

from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.waiting import wait_until, wait_until_async

__all__ = ["wait_until", "wait_until_async", "write_tiny_model"]
