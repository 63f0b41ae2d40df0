"""Shared memory between the processes of one host.

Segments that have no name, doorbells to wake who sleeps, byte rings and step rings to carry records,
slabs for what is too big for a ring, and columnar frames. Every class here is synchronous and is driven
from outside: this room knows no event loop, no tensor library, no actor and no model. It runs on Linux
x86-64 only, because its barriers and plain stores are ordered there and nowhere else.
"""

from __future__ import annotations

from shm.fence import require_platform

require_platform()
