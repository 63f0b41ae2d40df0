"""WalkOrder: which walks a partition of a model begins with, which follows which, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mstar.graph.errors import GraphError
from mstar.graph.nodes import check_name

__all__ = ["Transition", "WalkOrder"]


@dataclass(frozen=True, slots=True)
class Transition:
    """``next`` may follow ``walk``. A ``local`` one is taken by the worker itself, at once."""

    walk: str
    next: str
    local: bool = False


@dataclass(frozen=True, slots=True)
class WalkOrder:
    """The walks of one partition as a state machine; a request is in one of them at a time.

    ``first`` walks may begin it and ``ends`` walks may end it. A walk in ``may_end`` samples a token that
    can end the partition before any walk of ``ends`` has run: a stop id sampled by a prefill. ``inputs``
    gives, for a walk, the names of its inputs that come with the request. A walk with a local transition
    has no other one. Raises GraphError.
    """

    first: tuple[str, ...]
    ends: frozenset[str]
    transitions: tuple[Transition, ...] = ()
    may_end: frozenset[str] = frozenset()
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))
        for name in self.walks:
            check_name("walk", name)
        if not self.first:
            raise GraphError("a walk order has no first walk; name the walks that a request may begin with")
        for walk, names in self.inputs.items():
            if not isinstance(names, tuple):
                raise GraphError(f"the inputs of walk {walk!r} are {names!r}; give a tuple of names")
        for walk in self.walks:
            self._check_walk(walk)
        reached = set(self.first)
        for _ in self.walks:
            reached |= {step.next for step in self.transitions if step.walk in reached}
        for walk in self.walks:
            if walk not in reached:
                raise GraphError(
                    f"no request ever comes to walk {walk!r}; make it a first walk or let another lead to it"
                )

    def _check_walk(self, walk: str) -> None:
        after = [step.next for step in self.transitions if step.walk == walk]
        if len(set(after)) != len(after):
            raise GraphError(f"walk {walk!r} has two transitions to the same walk; leave one out")
        if not after and walk not in self.ends:
            raise GraphError(
                f"nothing follows walk {walk!r} and it ends nothing; give it a transition or list it in ends"
            )
        if self.local_next(walk) is not None and (len(after) > 1 or walk in self.ends):
            raise GraphError(
                f"walk {walk!r} has a local transition and another way to go on; a worker that goes on by "
                "itself has nothing to choose from: make it the only one, or none of them local"
            )

    @property
    def walks(self) -> tuple[str, ...]:
        """Every walk that is named, in order of first mention."""
        pairs = (name for step in self.transitions for name in (step.walk, step.next))
        rest = (*sorted(self.ends), *sorted(self.may_end), *self.inputs)
        return tuple(dict.fromkeys((*self.first, *pairs, *rest)))

    def local_next(self, walk: str) -> str | None:
        """The walk that a worker goes on to by itself when ``walk`` ends."""
        return next((step.next for step in self.transitions if step.walk == walk and step.local), None)

    def before(self, walk: str) -> tuple[str, ...]:
        """The walks that may lead to ``walk``."""
        return tuple(step.walk for step in self.transitions if step.next == walk)
