"""Which prompts may share pages of the KV cache: the digests they are sent with, and the key of these."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.prefix import page_digests

__all__ = ["NOTHING_SHARED", "Sharing"]

_KEY_BYTES = 32


class Sharing(NamedTuple):
    """How prompts are hashed, page by page of ``page_size`` tokens.

    With ``cache`` all of them with ``salt``, which is drawn once per start of the daemon, so that whoever
    begins like another finds its pages. Without, only the prompts of a request of several choices, with a
    key that nobody else has: the choices share their prompt, and nothing outlives them. Without a salt,
    which anybody could hash with, no prompt is hashed.
    """

    page_size: int
    salt: bytes
    cache: bool

    def digests(self, prompts: Sequence[NDArray[np.int32]], choices: int) -> list[bytes]:
        """The digests of each of a request's ``prompts`` (int32 [n]), 16 bytes a full page; b"" for none.

        A microsecond or less a page: small prompts may be hashed on a loop, others not.
        """
        if not self.salt or not (self.cache or choices > 1):
            return [b""] * len(prompts)
        key = self.salt if self.cache else secrets.token_bytes(_KEY_BYTES)
        return [page_digests(prompt, self.page_size, key) for prompt in prompts]


NOTHING_SHARED = Sharing(1, b"", False)
