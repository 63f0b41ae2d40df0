"""The eventfd."""

from __future__ import annotations

import os
import select

from shm.doorbell import Doorbell


def readable(bell: Doorbell) -> bool:
    return bool(select.select([bell.fd], [], [], 0)[0])


def test_a_doorbell_is_readable_from_the_ring_to_the_drain() -> None:
    bell = Doorbell.create()
    assert not readable(bell)
    bell.ring()
    bell.ring()
    assert readable(bell)
    assert bell.drain() == 2
    assert not readable(bell)
    assert bell.drain() == 0
    bell.close()


def test_a_bell_at_its_maximum_is_still_rung() -> None:
    bell = Doorbell.create()
    os.eventfd_write(bell.fd, 2**64 - 2)
    bell.ring()
    assert readable(bell)
    bell.close()


def test_an_attached_doorbell_wakes_the_same_sleeper_and_is_not_inherited() -> None:
    bell = Doorbell.create()
    fd = os.dup(bell.fd)
    os.set_inheritable(fd, True)
    other = Doorbell.attach(fd)
    assert not os.get_inheritable(other.fd)
    other.ring()
    assert bell.drain() == 1
    bell.close()
    other.close()
    other.close()
