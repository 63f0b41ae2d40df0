"""TextStream: whole characters, stop strings over any split of tokens, and the flush."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.gateway.text import StopStrings, TextStream, Vocabulary
from mstar.model.tokenizer import Tokenizer
from tests.gateway.tokens import SPECIAL, UNKNOWN, ByteTokenizer, PieceTokenizer, cuts

any_bytes = st.one_of(st.text(max_size=30).map(str.encode), st.binary(max_size=30))
few_letters = st.text("ab\u00e9\U0001f600", max_size=24)
stop_sets = st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=4), min_size=1, max_size=4)


def run(pieces: list[bytes], stops: list[str] | None = None) -> tuple[list[str], TextStream]:
    stream = TextStream(Vocabulary(ByteTokenizer(pieces)), stops or [])
    deltas = [stream.push(1 + index) for index in range(len(pieces))]
    return [*deltas, stream.flush()], stream


def cut_before(text: str, stops: list[str]) -> tuple[str, bool]:
    """The reference: character by character, the stop that is complete first, then the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.behaviour("F-23")
@settings(deadline=None)
@given(st.data(), any_bytes)
def test_deltas_joined_equal_the_whole_decode_for_any_bytes_and_any_split(
    data: st.DataObject, raw: bytes
) -> None:
    deltas, _ = run(data.draw(cuts(raw)))
    assert "".join(deltas) == raw.decode("utf-8", "replace")


@pytest.mark.behaviour("F-23")
@settings(deadline=None)
@given(st.data(), st.text(max_size=30))
def test_no_delta_of_valid_text_holds_a_broken_character(data: st.DataObject, text: str) -> None:
    text = text.replace("\ufffd", "")
    deltas, stream = run(data.draw(cuts(text.encode())))
    assert not any("\ufffd" in delta for delta in deltas)
    assert stream.delivered == stream.position == len(text)


@pytest.mark.behaviour("F-23")
@settings(deadline=None)
@given(st.text(min_size=1, max_size=4), st.integers(1, 3))
def test_a_sequence_cut_inside_a_character_ends_with_one_replacement(text: str, missing: int) -> None:
    raw = (text + "\U0001f600").encode()[:-missing]
    deltas, _ = run([bytes([byte]) for byte in raw])
    assert "".join(deltas) == text + "\ufffd"
    assert deltas[-1] == "\ufffd"


@pytest.mark.behaviour("F-25")
@settings(deadline=None)
@given(st.data(), few_letters, stop_sets)
def test_a_stop_string_split_anywhere_is_seen_and_never_leaks(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    deltas, stream = run(data.draw(cuts(text.encode())), stops)
    expected, stopped = cut_before(text, stops)
    assert "".join(deltas) == expected
    assert stream.stopped == stopped
    assert stream.delivered == len(expected)


@pytest.mark.behaviour("F-25")
@settings(deadline=None)
@given(st.data(), few_letters, stop_sets)
def test_only_a_proper_prefix_of_a_stop_is_held_back(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    stream = TextStream(Vocabulary(ByteTokenizer([char.encode() for char in text])), stops)
    sent, seen = "", ""
    for index, char in enumerate(text):
        sent += stream.push(1 + index)
        seen += char
        if stream.stopped:
            break
        held = seen[len(sent) :]
        assert seen == sent + held
        assert held == "" or any(stop != held and stop.startswith(held) for stop in stops)
        longest = max(
            (n for n in range(len(seen) + 1) for s in stops if len(s) > n and seen.endswith(s[:n])), default=0
        )
        assert len(held) == longest


@pytest.mark.behaviour("F-25")
def test_nothing_leaves_after_a_stop_not_even_from_the_flush() -> None:
    stream = TextStream(
        Vocabulary(ByteTokenizer([b"say st", b"op and more", b" then \xf0\x9f", b"x"])), ["stop"]
    )
    assert [stream.push(token) for token in (1, 2, 3, 4)] == ["say ", "", "", ""]
    assert stream.flush() == ""
    assert stream.stopped


def test_a_stop_that_the_flush_completes_is_a_stop() -> None:
    stream = TextStream(Vocabulary(ByteTokenizer([b"ab", b"\xf0\x9f"])), ["\ufffd"])
    assert stream.push(1) + stream.push(2) == "ab"
    assert stream.flush() == ""
    assert stream.stopped


def test_what_was_held_back_leaves_with_the_flush() -> None:
    stream = TextStream(Vocabulary(ByteTokenizer([b"say st"])), ["stop"])
    assert stream.push(1) == "say "
    assert stream.pending
    assert stream.flush() == "st"
    assert not stream.stopped
    assert not stream.pending


def test_special_tokens_are_not_shown_even_inside_a_character() -> None:
    stream = TextStream(Vocabulary(ByteTokenizer([b"\xc3", b"\xa9"])))
    assert [stream.push(token) for token in (SPECIAL, 1, SPECIAL, 2)] == ["", "", "", "\u00e9"]
    assert stream.flush() == ""


def test_an_id_outside_the_vocabulary_adds_nothing() -> None:
    stream = TextStream(Vocabulary(ByteTokenizer([b"a"])))
    assert stream.push(UNKNOWN) + stream.push(1) + stream.flush() == "a"


@settings(deadline=None)
@given(st.data(), few_letters, stop_sets)
def test_the_matched_stop_does_not_depend_on_the_split(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    whole, split = StopStrings(stops), StopStrings(stops)
    expected = whole.push(text) + whole.flush()
    found = "".join([split.push(piece.decode()) for piece in data.draw(cuts_of_text(text))]) + split.flush()
    assert (found, split.matched) == (expected, whole.matched)


def cuts_of_text(text: str) -> st.SearchStrategy[list[bytes]]:
    places = st.lists(st.integers(0, len(text)), max_size=8)

    def cut(at: list[int]) -> list[bytes]:
        edges = [0, *sorted(at), len(text)]
        return [text[low:high].encode() for low, high in itertools.pairwise(edges)]

    return places.map(cut)


@pytest.mark.behaviour("F-23")
@settings(deadline=None)
@given(
    st.lists(st.sampled_from([b"a", b" word", "\u00e9".encode(), b"\xf0\x9f", b"\x98\x80", b""]), max_size=12)
)
def test_vocabularies_without_bytes_decode_by_a_window(pieces: list[bytes]) -> None:
    tokenizer = PieceTokenizer(pieces)
    stream = TextStream(Vocabulary(tokenizer))
    tokens = list(range(1, len(pieces) + 1))
    deltas = [*[stream.push(token) for token in tokens], stream.flush()]
    assert "".join(deltas) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.behaviour("F-23")
@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_a_real_tokenizer_streams_every_text_as_it_decodes_it(tiny_tokenizer: Tokenizer, text: str) -> None:
    tokens = tiny_tokenizer.encode(text, add_special_tokens=False).tolist()
    stream = TextStream(Vocabulary(tiny_tokenizer))
    streamed = "".join([stream.push(token) for token in tokens]) + stream.flush()
    visible = [token for token in tokens if token not in tiny_tokenizer.special_ids]
    assert streamed == tiny_tokenizer.decode(visible, skip_special_tokens=True)
