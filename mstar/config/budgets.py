"""A deployment's token budgets, spread over the nodes of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mstar.config.load import ConfigError
from mstar.config.schema import Budgets

__all__ = ["budget_overrides", "check_rows"]


def budget_overrides(
    budgets: Budgets | None, budgeted: Mapping[str, Collection[str]]
) -> dict[str, int | Mapping[str, int | None] | None]:
    """What ``max_batch_tokens`` of a deployment means for ``ChunkingManagement.set_budgets``.

    ``budgeted`` maps every node of the model to the walks that the model budgets on it, none for a node
    that it does not budget. A number is for every budgeted node and "off" turns chunking off on each of
    them; a mapping is taken as it is. Budgets are tokens of one step. Raises ConfigError for a node that
    the model does not have; the walks of a mapping are checked by ``set_budgets``.
    """
    if budgets is None:
        return {}
    if isinstance(budgets, Mapping):
        for node, value in budgets.items():
            if node not in budgeted:
                raise ConfigError(
                    f"max_batch_tokens.{node} is {value!r}, but the model has no node {node!r}; "
                    f"allowed are {', '.join(sorted(budgeted)) or 'none'}"
                )
        return dict(budgets)
    number = None if budgets == "off" else budgets
    return {node: number for node, walks in budgeted.items() if walks}


def check_rows(budgets: Budgets | None, rows: int, decoding: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError where a step that rows decode in would have less than a token for each of ``rows``.

    ``decoding`` gives by node the walks of such steps, a combined walk or the decode walk itself; ``rows``
    is max_num_seqs. Other walks and nodes may have smaller budgets.
    """
    for node, value in budgets.items() if isinstance(budgets, Mapping) else ():
        for walk in decoding.get(node, ()):
            number = value.get(walk) if isinstance(value, Mapping) else value
            if number is not None and number < rows:
                path = f"max_batch_tokens.{node}" + (f".{walk}" if isinstance(value, Mapping) else "")
                raise ConfigError(
                    f"{path} is {number}, less than max_num_seqs, which is {rows}; every sequence takes a "
                    "token of a step: raise the one or lower the other"
                )
