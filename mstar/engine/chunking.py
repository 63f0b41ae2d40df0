"""Chunked prefill's state on an engine: policies, token budgets, inputs held between chunks, overruns.

Nothing here cuts, runs or sends anything: the scheduler asks for budgets and floors, whoever runs a chunk
takes it from the input held here, and the graph counts the tokens. It knows no tensors and no clock.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, Self

from mstar.graph.policy import NO_CHUNKING, ChunkingPolicy

__all__ = [
    "DEFAULT_MIN_CHUNK_TOKENS",
    "NO_CHUNKING",
    "BudgetOutOfRange",
    "ChunkRange",
    "ChunkingError",
    "ChunkingManagement",
    "ChunkingPolicy",
    "ChunkingStatistics",
    "MixedWalkOverride",
    "NodeInputs",
    "PoliciesNotSet",
    "StepBatch",
    "SubmoduleManagement",
    "TokenCount",
    "UnbudgetedWalk",
    "UnknownNode",
    "UnknownWalk",
]

DEFAULT_MIN_CHUNK_TOKENS = 64
"""The floor of a deployment that sets no ``min_chunk_tokens``: tokens, four pages of the default size."""

_SP_REASON = "it runs with sequence parallelism, which chunked prefill does not support"
_log = logging.getLogger(__name__)


class ChunkingError(ValueError):
    """A budget cannot be what a deployment asks for; the message names the value and what is allowed."""


class PoliciesNotSet(ChunkingError):
    """Budgets were set before the policies that they override."""


class UnknownNode(ChunkingError):
    """A setting names a node that the model does not have."""


class UnknownWalk(ChunkingError):
    """A setting names a walk that does not run the node."""


class UnbudgetedWalk(ChunkingError):
    """A setting names a node or walk that the model does not budget, where it would do nothing."""


class MixedWalkOverride(ChunkingError):
    """A setting names a walk whose steps run under the budget of a combined walk."""


class BudgetOutOfRange(ChunkingError):
    """A number of tokens is below 1, or no whole number."""


class ChunkRange(NamedTuple):
    """The tokens [start, end) that a chunked row runs in a step, of the ``total`` of its whole input.

    ``stride`` is how far the chunk moves the row's chunk Loop, which counts the tokens run and ends at
    ``total``: ``end`` for the first chunk of a prompt, whose Loop starts at 0 even where a cached prefix
    moves ``start`` on, and ``end - start`` for every later one. So the strides of a row add up to its total.
    """

    start: int
    end: int
    total: int
    stride: int

    @property
    def is_final(self) -> bool:
        """The chunk reaches the end of the input: its row yields a token, and is not cut again."""
        return self.end >= self.total


class TokenCount(Protocol):
    """What a row runs, as far as a budget is concerned."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the row runs in the step."""


class NodeInputs(TokenCount, Protocol):
    """The prepared input of one row at one node, which can be cut."""

    def slice(self, start: int, end: int) -> Self:
        """The tokens [start, end), without a copy where the input allows it."""


class SubmoduleManagement(Protocol):
    """What the engine knows of the code that runs a node."""

    def chunkable(self, graph_walk: str) -> bool:
        """The code can run a row of ``graph_walk`` in chunks and get the same result."""


class StepBatch(Protocol):
    """A step as it was scheduled."""

    @property
    def node_name(self) -> str:
        """The node that the step runs."""

    @property
    def graph_walk(self) -> str:
        """The walk that the step runs under: the combined walk, where its rows are of several walks."""


class ChunkingStatistics(NamedTuple):
    """Inputs held for rows mid-prefill, and steps that ran over their budget, by walk."""

    prepared: int
    overruns: dict[str, int]


class ChunkingManagement:
    """The chunking of an engine's nodes: what the model declares, then what the deployment makes of it.

    ``submodules`` is the engine's own table, node -> the management of its code; it may still be filled
    later. ``prepared`` holds, by (request, node), the whole input of every row mid-prefill, put there when
    the row is first cut. Without policies nothing is chunked and nothing has a budget.
    """

    def __init__(self, submodules: Mapping[str, SubmoduleManagement]) -> None:
        self.prepared: dict[tuple[int, str], NodeInputs] = {}
        self._submodules = submodules
        self._policies: dict[tuple[str, str], ChunkingPolicy] | None = None
        self._budgets: dict[tuple[str, str], int | None] = {}
        self._combined: dict[tuple[str, str], tuple[str, ...]] = {}
        self._mixed: frozenset[str] = frozenset()
        self._whole: frozenset[str] = frozenset()
        self._floor = DEFAULT_MIN_CHUNK_TOKENS
        self._overruns: Counter[str] = Counter()

    # ---- what is declared and configured -------------------------------------------------------

    def set_policies(self, policies: Mapping[tuple[str, str], ChunkingPolicy]) -> None:
        """Bind the policies that the model declares, by (node, walk), when it is loaded.

        They are the model's and do not change; the budgets that a deployment layers on top of them are
        those of ``set_budgets``, which comes after. Budgets set before are gone.
        """
        self._policies = dict(policies)
        self._budgets = {key: policy.max_batch_tokens for key, policy in policies.items()}
        self._combined, self._mixed, self._whole = {}, frozenset(), frozenset()
        self._floor = DEFAULT_MIN_CHUNK_TOKENS

    def set_budgets(
        self,
        overrides: Mapping[str, int | Mapping[str, int | None] | None],
        walks: Mapping[str, Collection[str]] | Collection[str],
        combined_walk_of: Callable[[str, str], str | None] | Mapping[str, str] | None = None,
        override_mixed: Collection[str] = (),
        no_chunking: Mapping[str, str] | Collection[str] = (),
        min_chunk_tokens: int = DEFAULT_MIN_CHUNK_TOKENS,
    ) -> None:
        """Apply a deployment's ``max_batch_tokens`` and ``min_chunk_tokens`` over the declared budgets.

        ``overrides`` gives by node a number for every walk that the model budgets there, None to turn
        chunking off, or by walk a number or None. All numbers are tokens of one step, at least 1.
        ``walks`` are the walks that run each node of the model, or simply all walks where every node runs
        in each; nodes of other engines may stand in both. ``combined_walk_of`` gives the combined walk whose
        steps the rows of a walk run in, under the combined walk's budget: by (node, walk), or as a mapping
        that holds on nodes that all of the combined walks run. The walk's own budget counts there on nodes
        in ``override_mixed`` alone, as a cap on its rows (``walk_caps``); on other nodes the combined walk
        has to be named. Nodes in ``no_chunking`` are chunked nowhere, for the reason that a mapping gives,
        which is logged; budgets for them are checked and have no effect.

        Each call starts from the declared budgets; one that raises changes nothing. Raises
        PoliciesNotSet, UnknownNode, UnknownWalk, UnbudgetedWalk, MixedWalkOverride and BudgetOutOfRange.
        """
        if self._policies is None:
            raise PoliciesNotSet(
                "set_budgets came before set_policies, whose budgets it overrides; call it after"
            )
        floor = _tokens("min_chunk_tokens", min_chunk_tokens)
        known, combined = self._known_walks(walks, combined_walk_of)
        for node, override in overrides.items():
            _check_node(f"max_batch_tokens.{node} is {_shown(override)}", node, known)
        for setting, names in (("override_mixed", override_mixed), ("no_chunking", no_chunking)):
            for node in names:
                _check_node(f"{setting} names {node!r}", node, known)
        budgets = {key: policy.max_batch_tokens for key, policy in self._policies.items()}
        for node, override in overrides.items():
            for walk, budget in self._overridden(node, override, known[node], combined, override_mixed):
                budgets[node, walk] = budget
        self._budgets = budgets
        inside: dict[tuple[str, str], list[str]] = {}
        for (node, walk), label in combined.items():
            inside.setdefault((node, label), []).append(walk)
        self._combined = {key: tuple(members) for key, members in inside.items()}
        self._mixed, self._whole, self._floor = frozenset(override_mixed), frozenset(no_chunking), floor
        for node in no_chunking:
            if any(policy.chunkable for (name, _), policy in self._policies.items() if name == node):
                reason = no_chunking[node] if isinstance(no_chunking, Mapping) else _SP_REASON
                _log.warning("node %s is not chunked and runs every prompt in one step: %s", node, reason)

    def _known_walks(
        self,
        walks: Mapping[str, Collection[str]] | Collection[str],
        combined_walk_of: Callable[[str, str], str | None] | Mapping[str, str] | None,
    ) -> tuple[dict[str, set[str]], dict[tuple[str, str], str]]:
        """By node the walks it may be asked about, and by (node, walk) the combined walk, if any."""
        declared = list(self._policies or {})
        nodes = dict.fromkeys((*self._submodules, *(node for node, _ in declared)))
        if isinstance(walks, Mapping):
            known = {node: set(walks.get(node, ())) for node in (*nodes, *walks)}
        else:
            known = {node: set(walks) for node in nodes}
        combined: dict[tuple[str, str], str] = {}
        for node, names in known.items():
            for walk in sorted(names):
                label = _label(node, walk, names, combined_walk_of)
                if label is not None:
                    combined[node, walk] = label
        for node, walk in (*declared, *((node, label) for (node, _), label in combined.items())):
            known[node].add(walk)
        return known, combined

    def _overridden(
        self,
        node: str,
        override: int | Mapping[str, int | None] | None,
        known: Collection[str],
        combined: Mapping[tuple[str, str], str],
        override_mixed: Collection[str],
    ) -> Iterator[tuple[str, int | None]]:
        """The walks of ``node`` that an override is for, each with its budget."""
        path = f"max_batch_tokens.{node}"
        budgeted = [walk for (name, walk), budget in self._declared() if name == node and budget is not None]
        if not isinstance(override, Mapping):
            if not budgeted:
                raise UnbudgetedWalk(
                    f"{path} is {_shown(override)}, but the model budgets no walk of that node, so it "
                    "would do nothing; leave it out"
                )
            budget = None if override is None else _tokens(path, override)
            yield from ((walk, budget) for walk in budgeted)
            return
        for walk, value in override.items():
            if walk not in known:
                raise UnknownWalk(
                    f"{path}.{walk} is {_shown(value)}, but no walk {walk!r} runs that node; "
                    f"{_allowed(walk, known)}"
                )
            if walk not in budgeted:
                free = [name for name in budgeted if (node, name) not in combined or node in override_mixed]
                raise UnbudgetedWalk(
                    f"{path}.{walk} is {_shown(value)}, but the model does not budget that walk, so it would "
                    f"do nothing; allowed are {', '.join(sorted(free)) or 'none'}"
                )
            if (node, walk) in combined and node not in override_mixed:
                label = combined[node, walk]
                raise MixedWalkOverride(
                    f"{path}.{walk} is {_shown(value)}, but rows of {walk} run in steps of {label}, under "
                    f"its budget, so it would do nothing; set {path}.{label} instead"
                )
            yield walk, None if value is None else _tokens(f"{path}.{walk}", value)

    def _declared(self) -> Iterator[tuple[tuple[str, str], int | None]]:
        return ((key, policy.max_batch_tokens) for key, policy in (self._policies or {}).items())

    # ---- what the scheduler asks ---------------------------------------------------------------

    def policy(self, node_name: str, graph_walk: str) -> ChunkingPolicy:
        """The model's policy for the node in that walk, or NO_CHUNKING where it declares none.

        It is declared on the model, because the graph is built from it (a chunkable walk runs the node in
        a Loop), and that happens before any submodule is loaded.
        """
        return (self._policies or {}).get((node_name, graph_walk), NO_CHUNKING)

    def chunkable(self, node_name: str, graph_walk: str) -> bool:
        """Rows of the node in that walk may be cut.

        The model declares it and the submodule can do it, and neither a null budget of the deployment nor
        the worker (``no_chunking``) turned it off. False for a node of another engine.
        """
        policy = self.policy(node_name, graph_walk)
        if not policy.chunkable or node_name in self._whole:
            return False
        if policy.max_batch_tokens is not None and self._budgets[node_name, graph_walk] is None:
            return False
        submodule = self._submodules.get(node_name)
        return submodule is not None and submodule.chunkable(graph_walk)

    def max_batch_tokens(self, node_name: str, graph_walk: str) -> int | None:
        """Most tokens of a step of that walk: the deployment's number, else the model's.

        None where the model budgets nothing, the deployment turned chunking off, or the worker chunks
        nothing on the node.
        """
        return None if node_name in self._whole else self._budgets.get((node_name, graph_walk))

    def min_chunk_tokens(self, budget: int) -> int:
        """Fewest tokens that a row is cut to in a step of ``budget`` tokens: the floor, at most the budget.

        Without a floor, decode rows that nearly fill a step would leave a prompt a token or two of each.
        """
        return min(self._floor, budget)

    def walk_caps(self, node_name: str, graph_walk: str) -> dict[str, int] | None:
        """Under a combined walk: by walk the most tokens that its rows may run together in one step.

        Only walks with a budget of their own are in it. None for a walk that combines nothing, and on
        nodes where the budget of a walk does not count in mixed steps (``override_mixed``).
        """
        walks = self._combined.get((node_name, graph_walk))
        if walks is None or node_name not in self._mixed or node_name in self._whole:
            return None
        budgets = ((walk, self._budgets.get((node_name, walk))) for walk in walks)
        return {walk: budget for walk, budget in budgets if budget is not None}

    # ---- what runs -----------------------------------------------------------------------------

    def check_budget(self, batch: StepBatch, node_inputs: Iterable[TokenCount]) -> None:
        """Log a step whose rows run more tokens together than the budget it was scheduled under.

        That is no error: a row too long to cut runs whole, and a step merged while another one runs sizes
        the rows that go on by estimate, before their inputs exist. ``node_inputs`` is what each row runs in
        this step. Logged on the 1st, 2nd, 4th, 8th... overrun of a walk.
        """
        budget = self.max_batch_tokens(batch.node_name, batch.graph_walk)
        if budget is None:
            return
        tokens = sum(inputs.num_tokens for inputs in node_inputs)
        if tokens <= budget:
            return
        walk = batch.graph_walk
        self._overruns[walk] += 1
        count = self._overruns[walk]
        if count & (count - 1) == 0:
            _log.warning(
                "a step of walk %s on node %s runs %d tokens, more than its budget of %d (overrun %d of the "
                "walk); a row that cannot be cut runs whole, and rows that go on were sized by estimate",
                walk,
                batch.node_name,
                tokens,
                budget,
                count,
            )

    def release(self, rid: int, node_name: str) -> None:
        """The last chunk of the row has landed: its whole input is not needed any more."""
        self.prepared.pop((rid, node_name), None)

    def forget_request(self, rid: int) -> None:
        """The request ended or was aborted: nothing of it is held any more. May be told again."""
        for key in [key for key in self.prepared if key[0] == rid]:
            del self.prepared[key]

    def statistics(self) -> ChunkingStatistics:
        """Inputs held now, and overruns so far."""
        return ChunkingStatistics(len(self.prepared), dict(self._overruns))


def _label(
    node: str,
    walk: str,
    names: Collection[str],
    combined_walk_of: Callable[[str, str], str | None] | Mapping[str, str] | None,
) -> str | None:
    if combined_walk_of is None or not isinstance(combined_walk_of, Mapping):
        return combined_walk_of(node, walk) if combined_walk_of else None
    label = combined_walk_of.get(walk)
    apart = [other for other, shared in combined_walk_of.items() if shared == label and other not in names]
    return None if apart else label


def _tokens(path: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BudgetOutOfRange(f"{path} is {value!r}; allowed is a whole number of at least 1")
    return value


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)


def _allowed(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f". Did you mean {close[0]}?" if close else ""
    return f"allowed are {', '.join(sorted(known)) or 'none'}{hint}"


def _check_node(what: str, node: str, known: Collection[str]) -> None:
    if node not in known:
        raise UnknownNode(f"{what}, but the model has no node {node!r}; {_allowed(node, known)}")
