"""decode_body: JSON as it is, whatever its size, and a clear refusal of what is none."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.validation import body as bodies
from mstar.validation.body import MAX_DEPTH, MAX_ITEMS, decode_body
from mstar.validation.errors import RequestInvalid

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8), st.dictionaries(st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=20,
)


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small bodies as if they were large."""
    monkeypatch.setattr(bodies, "PIECE", 8)
    monkeypatch.setattr(bodies, "MANY", 1)


@pytest.mark.usefixtures("tiny_pieces")
@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=6), values, max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_a_body_cut_to_pieces_decodes_as_a_whole_one(
    value: dict[str, Any], indent: int | None, ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode()
    assert plain(decode_body(text)) == json.loads(text)


@pytest.mark.usefixtures("tiny_pieces")
@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["[", "]", "{", "}", ",", ":", '"', "\\", "1", "22222", '"a"', "null", " ", "\n"]),
        max_size=20,
    ).map("".join)
)
def test_a_malformed_body_cut_to_pieces_is_refused_like_a_whole_one(inner: str) -> None:
    text = ('{"a":' + inner + "}").encode()
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(RequestInvalid, match="JSON"):
            decode_body(text)
    else:
        assert plain(decode_body(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nothing",
        b"{",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"'{}'",
        b"[1]",
        b"null",
        b'"a"',
        b"1",
    ],
)
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(RequestInvalid, match="JSON") as found:
        decode_body(text)
    assert found.value.status == 400


@pytest.mark.behaviour("F-15")
def test_a_large_list_of_integers_comes_as_an_array() -> None:
    tokens = [number * 7 % 50000 for number in range(200_000)]
    found = decode_body(json.dumps({"prompt": tokens, "model": "m"}).encode())
    assert isinstance(found["prompt"], np.ndarray)
    assert found["prompt"].dtype == np.int64
    assert found["prompt"].tolist() == tokens


@pytest.mark.behaviour("F-15")
def test_no_decoder_call_sees_more_than_a_piece_of_a_body_of_many_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def counted(decode: Any) -> Any:
        def call(text: Any) -> Any:
            sizes.append(len(text))
            return decode(text)

        return call

    monkeypatch.setattr(bodies, "_decode", counted(bodies._decode))
    messages = [{"role": "user", "content": "hello"}] * 50_000
    body = json.dumps({"messages": messages, "model": "m"}).encode()
    assert decode_body(body)["messages"] == messages
    assert max(sizes) <= bodies.PIECE + 2
    assert sum(sizes) >= len(body) - 200


def test_nesting_beyond_the_bound_is_refused_at_every_size() -> None:
    for depth in (MAX_DEPTH * 1000, 100_000):
        with pytest.raises(RequestInvalid, match="nests too deeply"):
            decode_body(b"[" * depth + b"]" * depth)


def test_a_list_of_too_many_values_is_refused() -> None:
    with pytest.raises(RequestInvalid, match=f"at most {MAX_ITEMS}"):
        decode_body(b'{"a":[' + b",".join([b"{}"] * (MAX_ITEMS + 1)) + b"]}")


def test_the_last_of_two_equal_names_counts() -> None:
    assert decode_body(b'{"a":1,"a":2}') == {"a": 2}
