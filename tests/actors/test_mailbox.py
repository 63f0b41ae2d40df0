"""A mailbox drains a bounded number of records and survives what does not decode."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from actors.errors import MalformedMessage
from actors.mailbox import Mailbox
from shm.codec import Table
from shm.ring import Ring, RingReader, RingWriter
from tests.actors.toys import Ping


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring.create(4096, reserved=0)
    yield ring
    ring.close()


def test_records_reach_the_handler_in_order_and_in_bounded_numbers(ring: Ring) -> None:
    writer, seen = RingWriter(ring, None), list[Ping]()
    box = Mailbox(RingReader(ring), msgspec.msgpack.Decoder(Ping), seen.append)
    for number in range(5):
        writer.send(msgspec.msgpack.encode(Ping(number, 1)))
    assert box.drain(3) is True
    assert [ping.number for ping in seen] == [0, 1, 2]
    assert box.drain(3) is False
    assert [ping.number for ping in seen] == [0, 1, 2, 3, 4]


def test_a_record_that_does_not_decode_is_named_and_skipped(ring: Ring) -> None:
    writer, seen, errors = RingWriter(ring, None), list[Ping](), list[MalformedMessage]()
    box = Mailbox(
        RingReader(ring), msgspec.msgpack.Decoder(Ping), seen.append, name="there", on_error=errors.append
    )
    for record in (b"", b"\xc1", msgspec.msgpack.encode(["one"]), msgspec.msgpack.encode(Ping(7, 1))):
        writer.send(record)
    assert box.drain() is False
    assert [ping.number for ping in seen] == [7]
    assert [str(error).partition(":")[0] for error in errors] == [
        f"record of {size} bytes in mailbox 'there' does not decode" for size in (0, 1, 5)
    ]
    assert box.statistics() == (1, 3)


def test_malformed_records_are_logged_at_powers_of_two(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    writer = RingWriter(ring, None)
    box: Mailbox[Ping] = Mailbox(RingReader(ring), msgspec.msgpack.Decoder(Ping), lambda ping: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            writer.send(b"\xc1")
            box.drain()
    assert [record.args[1] for record in caplog.records if record.args] == [1, 2, 4, 8]  # type: ignore[index]


def test_a_table_is_decoded_too_and_its_errors_are_not_fatal(ring: Ring) -> None:
    writer, seen = RingWriter(ring, None), list[list[int]]()
    table = Table("tokens", {"token": "int32"})
    box = Mailbox(RingReader(ring), table, lambda columns: seen.append(columns["token"].tolist()))
    writer.send(table.encode({"token": np.arange(3, dtype=np.int32)})[:-1])
    writer.send(table.encode({"token": np.arange(3, dtype=np.int32)}))
    box.drain()
    assert seen == [[0, 1, 2]]
    assert box.statistics() == (1, 1)


def test_what_the_handler_raises_propagates_and_its_record_is_consumed(ring: Ring) -> None:
    writer = RingWriter(ring, None)

    def handler(ping: Ping) -> None:
        raise RuntimeError(f"ping {ping.number}")

    box = Mailbox(RingReader(ring), msgspec.msgpack.Decoder(Ping), handler)
    writer.send(msgspec.msgpack.encode(Ping(1, 1)))
    writer.send(msgspec.msgpack.encode(Ping(2, 1)))
    for number in (1, 2):
        with pytest.raises(RuntimeError, match=f"ping {number}"):
            box.drain()
    assert box.drain() is False
