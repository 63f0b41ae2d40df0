"""The digest by which the ranks of one cell know that they were configured alike."""

from __future__ import annotations

import hashlib

import msgspec

from mstar.config.schema import Deployment

__all__ = ["digest"]


def digest(deployment: Deployment, model_directory: str, world: int = 1) -> str:
    """32 hexadecimal digits over everything that the ranks of a cell must agree on.

    That is the whole ``deployment`` (the pipeline depth is the leader's, so a rank told another one would
    not run the leader's plans), the files of the model, and the size of the cell.
    """
    facts = msgspec.msgpack.encode((deployment, model_directory, world), order="deterministic")
    return hashlib.blake2b(facts, digest_size=16).hexdigest()
