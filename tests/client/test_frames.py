"""The native protocol's frames and the events of a stream, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.client.errors import ProtocolError
from mstar.client.frames import FrameReader, frame
from mstar.client.sse import EventReader

messages = st.lists(st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=5), max_size=3))


@given(messages, st.integers(1, 7))
def test_frames_survive_any_cut(sent: list[dict[str, object]], size: int) -> None:
    stream, reader = b"".join(map(frame, sent)), FrameReader()
    found = [m for i in range(0, len(stream), size) for m, _ in reader.feed(stream[i : i + size])]
    assert found == sent


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="frame of 11 bytes; at most 10"):
        FrameReader(limit=10).feed((11).to_bytes(4, "little"))


def test_a_frame_that_is_no_map_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not a msgpack map"):
        FrameReader().feed(b"\x01\x00\x00\x00\x01")


@given(st.lists(st.text(alphabet="ab é\t", max_size=4), max_size=4), st.integers(1, 5))
def test_events_survive_any_cut(sent: list[str], size: int) -> None:
    stream = "".join(f": ping\n\ndata: {text}\r\n\r\n" for text in sent).encode()
    reader = EventReader()
    found = [e.decode() for i in range(0, len(stream), size) for e in reader.feed(stream[i : i + size])]
    assert found == sent


def test_an_event_of_two_data_lines_is_one_event() -> None:
    assert EventReader().feed(b"event: x\ndata: a\ndata: b\n\n") == [b"a\nb"]
