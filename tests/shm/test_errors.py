"""What the failures say."""

from __future__ import annotations

import pytest

from shm.errors import NoSharedMemory, RingStuck, ShmError


@pytest.mark.behaviour("F-11")
def test_too_little_shared_memory_names_both_sizes_and_the_docker_flags() -> None:
    error = NoSharedMemory(300 << 20, 64 << 20, "ENOSPC")
    assert (error.needed, error.free) == (300 << 20, 64 << 20)
    for part in ("300 MiB", "64.0 MiB", "--shm-size=", "--ipc=host"):
        assert part in str(error)


def test_an_unknown_amount_of_free_memory_is_said_to_be_unknown() -> None:
    assert "unknown amount" in str(NoSharedMemory(4096, None, "EACCES"))


def test_a_stuck_ring_without_a_heartbeat_says_so() -> None:
    assert "no heartbeat yet" in str(RingStuck(0, 0, 8, "loading", 1.0, None))


def test_every_failure_is_a_shm_error() -> None:
    assert issubclass(NoSharedMemory, ShmError)
    assert issubclass(RingStuck, ShmError)
