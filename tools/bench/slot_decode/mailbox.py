"""The shared mapping between host and device, and the word that says how many steps have landed."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

RING = 4  # entries of each ring: at least depth + 2


class Mailbox:
    """One shared mapping that host and device both reach: a word, and rings of RING entries.

    The device writes tokens [RING, capacity] and then the word (steps done, 64 bits at offset 0); the
    host writes the rest. On a GPU the mapping is pinned with cudaHostRegister, and kernels address it.
    """

    def __init__(self, capacity: int, grants: int, *, pinned: bool) -> None:
        fields: dict[str, tuple[int, ...]] = {"slots": (RING, capacity), "tokens": (RING, capacity)}
        fields |= {"counts": (RING, 2), "binds": (RING, capacity, 3), "grants": (RING, grants, 3)}
        offsets, end = dict[str, int](), 4096
        for name, size in fields.items():
            offsets[name] = end
            end += -(-4 * int(np.prod(size)) // 4096) * 4096
        self.mapping = mmap.mmap(-1, end)
        view = memoryview(self.mapping)
        self.words = view[:8].cast("Q")
        self.word = torch.frombuffer(self.mapping, dtype=torch.int64, count=1)
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.pinned = pinned
        if pinned:
            status = torch.cuda.cudart().cudaHostRegister(self.word.data_ptr(), end, 2)
            if int(status) != 0:
                raise RuntimeError(f"cudaHostRegister of {end} bytes failed with CUDA error {int(status)}")
        for name, size in fields.items():
            flat = torch.frombuffer(
                self.mapping, dtype=torch.int32, count=int(np.prod(size)), offset=offsets[name]
            )
            self.tensors[name] = flat.view(size)
            self.arrays[name] = self.tensors[name].numpy()

    def close(self) -> None:
        """Unpin: a mapping that goes away while registered leaves its addresses unusable for the next one."""
        if self.pinned:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.word.data_ptr())
            self.pinned = False
