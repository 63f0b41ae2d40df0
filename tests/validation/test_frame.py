"""decode_frame: msgpack as it is, whatever its size."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.validation import frame as frames
from mstar.validation.body import MAX_DEPTH, MAX_ITEMS
from mstar.validation.errors import RequestInvalid
from mstar.validation.frame import decode_frame
from tests.validation.test_body import plain

encode = msgspec.msgpack.encode
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=40),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=20), st.dictionaries(st.text(max_size=4), inner, max_size=20)
    ),
    max_leaves=30,
)
tokens = st.lists(st.sampled_from([0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1]), max_size=12)


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk small frames as if they were large."""
    monkeypatch.setattr(frames, "PIECE", 0)
    monkeypatch.setattr(frames, "_RUN", 4)


@pytest.mark.usefixtures("tiny_pieces")
@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=6), st.one_of(values, tokens), max_size=4))
def test_a_walked_frame_decodes_as_a_whole_one(value: dict[str, Any]) -> None:
    assert plain(decode_frame(encode(value))) == value


@pytest.mark.usefixtures("tiny_pieces")
@settings(deadline=None)
@given(st.binary(max_size=30), st.integers(0, 40))
def test_a_malformed_frame_is_refused_and_never_breaks_the_walk(garbage: bytes, cut: int) -> None:
    frame = encode({"op": "x", "body": {"prompt": [1, 2, 300, 4, 5, 70000], "b": [None, 1.5, -3]}})
    for broken in (frame[:cut] + garbage, garbage, frame + garbage):
        try:
            walked = decode_frame(broken)
        except RequestInvalid:
            continue
        assert repr(plain(walked)) == repr(msgspec.msgpack.decode(broken))


@pytest.mark.behaviour("F-15")
def test_a_large_list_of_token_ids_comes_as_an_array() -> None:
    prompt = [number * 7 % 200_000 for number in range(100_000)]
    found = decode_frame(encode({"prompt": prompt, "lists": [prompt[:50_000], [1, 2]]}))
    assert isinstance(found["prompt"], np.ndarray)
    assert found["prompt"].tolist() == prompt
    assert plain(found["lists"]) == [prompt[:50_000], [1, 2]]


def test_bounds_of_a_large_frame() -> None:
    deep: Any = "x" * 100_000
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    for value, words in ((deep, "levels"), ([None] * (MAX_ITEMS + 1), f"at most {MAX_ITEMS}")):
        with pytest.raises(RequestInvalid, match=words):
            decode_frame(encode({"a": value}))
    with pytest.raises(RequestInvalid, match="binary"):
        decode_frame(encode({"a": b"x" * 100_000}))
