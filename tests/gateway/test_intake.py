"""Intake: texts far beyond what can be served are refused before they cost much."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mstar.gateway.intake import Intake
from mstar.model.spec import GenerationDefaults
from mstar.model.tokenizer import Tokenizer
from mstar.validation.errors import RequestInvalid
from mstar.validation.fields import CHAT, COMPLETION
from mstar.validation.request import Limits

WINDOW = 64


class Spy:
    """A tokenizer that remembers how long the texts were that it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        self.lengths.append(len(text))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def spy(tiny_tokenizer: Tokenizer) -> Spy:
    return Spy(tiny_tokenizer)


def intake(spy: Spy) -> Intake:
    limits = Limits(spy._tokenizer.vocab_size, WINDOW)
    return Intake(spy, limits, GenerationDefaults(), ("tiny",))  # type: ignore[arg-type]


@pytest.mark.behaviour("F-15")
@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        (COMPLETION, {"model": "tiny", "prompt": "the cat " * 100_000}, "prompt"),
        (
            CHAT,
            {"model": "tiny", "messages": [{"role": "user", "content": "the cat " * 100_000}]},
            "messages",
        ),
    ],
)
def test_a_text_far_beyond_the_window_is_refused_by_its_head(
    spy: Spy, kind: str, body: dict[str, object], path: str
) -> None:
    with pytest.raises(
        RequestInvalid, match=f"`{path}` has .* characters.*window of this model is 64"
    ) as caught:
        intake(spy).recipe(kind, body)
    assert caught.value.code == "context_length_exceeded"
    assert spy.lengths == [WINDOW * 16]


def test_a_text_just_beyond_the_window_is_told_its_tokens(spy: Spy) -> None:
    with pytest.raises(RequestInvalid, match=r"`prompt` has \d+ tokens"):
        intake(spy).recipe(COMPLETION, {"model": "tiny", "prompt": "the cat " * 40})


@pytest.mark.behaviour("F-15")
def test_tokenize_bounds_a_text_that_no_window_bounds(spy: Spy) -> None:
    with pytest.raises(RequestInvalid, match="1048577 characters; at most 1048576"):
        intake(spy).tokenize({"prompt": "a" * ((1 << 20) + 1)})
    assert not spy.lengths
