"""The actor runtime: processes that are wired once, exchange messages through shared memory, and are watched.

A `Wiring` declares actors, and the rings, slabs and step rings between them; the `Supervisor` in the daemon's
process creates all of it, starts one process per actor, sees deaths and restarts whole cells; inside a
process an `Actor` works against its `Context`. This room is not a scheduler, knows no model, no HTTP and no
torch, and decides nothing about the messages it carries.
"""
