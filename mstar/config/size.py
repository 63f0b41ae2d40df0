"""Byte counts as people write them: 1073741824, 512MiB, 1.5GB."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes that ``text`` means. Units: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (1024).

    Raises ValueError for anything else, with the allowed units in the message.
    """
    match = _PATTERN.fullmatch(text)
    unit = None
    if match:
        spelled = match[2].upper().replace("IB", "iB")
        unit = _UNITS.get(spelled)
    if match is None or unit is None:
        raise ValueError("allowed is a number of bytes, or one with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that divides it: 1073741824 is "1GiB", 1000 is "1000"."""
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{prefix}iB"
    return str(nbytes)
