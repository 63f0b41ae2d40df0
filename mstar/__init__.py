"""M*: a serving engine for composite, any-to-any models on one host.

The names a program needs, imported when first used; none of them imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar.client.aio import AsyncClient
    from mstar.client.engine import Engine
    from mstar.client.sync import Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Engine", "__version__"]

_HOMES = {
    "AsyncClient": "mstar.client.aio",
    "Client": "mstar.client.sync",
    "Engine": "mstar.client.engine",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mstar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
