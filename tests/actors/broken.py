"""A module that does not import."""

from __future__ import annotations

raise ImportError("broken on purpose")
