"""Ranks of a cell know that they were configured alike."""

from __future__ import annotations

import re

import msgspec
import pytest

from mstar.config.digest import digest
from mstar.config.schema import Deployment, Listen, NodeGroup, RankConfig

BASE = Deployment(tensor_parallel_size=2, max_batch_tokens={"llm": {"prefill": 64, "mixed": 128}})


@pytest.mark.behaviour("S0-35")
@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(BASE, pipeline_depth=0),
        msgspec.structs.replace(BASE, max_batch_tokens={"llm": {"prefill": 64, "mixed": None}}),
        msgspec.structs.replace(BASE, page_size=8),
        msgspec.structs.replace(BASE, node_groups=(NodeGroup(),)),
        msgspec.structs.replace(BASE, listen=Listen(port=1)),
    ],
)
def test_every_difference_of_the_deployment_is_another_digest(other: Deployment) -> None:
    assert digest(other, "model", 2) != digest(BASE, "model", 2)


@pytest.mark.behaviour("S0-35")
def test_the_model_and_the_size_of_the_cell_are_in_the_digest() -> None:
    digests = {digest(BASE, "model", 2), digest(BASE, "other", 2), digest(BASE, "model", 3)}
    assert len(digests) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in digests)


def test_a_copy_that_came_over_the_wire_has_the_same_digest() -> None:
    config = RankConfig(1, BASE, "name", "model", world=2, prefix_salt=b"\0salt", group="meet")
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=RankConfig)
    assert copy == config
    assert digest(copy.deployment, copy.model_directory, copy.world) == digest(BASE, "model", 2)


def test_the_order_of_a_mapping_does_not_matter() -> None:
    turned = msgspec.structs.replace(BASE, max_batch_tokens={"llm": {"mixed": 128, "prefill": 64}})
    assert digest(turned, "model") == digest(BASE, "model")
