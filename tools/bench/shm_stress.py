"""Look for lost wake-ups: a producer that always sends just when the consumer is going to sleep.

    python -m tools.bench.shm_stress --messages 5000000 --state stress.json

Two processes, one ring, the real classes. A wake-up is lost when the consumer's sleep times out, there is
work, and no bell comes for it afterwards either. The run is cut into rounds with a seed each; with --state a
run that was stopped goes on where it was. --drop N swallows every Nth ring of the bell, to see that the
search finds something. --litmus runs the bare store and load of both sides, fenced and not, and counts how
often both missed the other's store.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from shm.board import Board
from shm.doorbell import Doorbell
from shm.fence import fence
from shm.ring import Ring, RingReader, RingWriter
from shm.wait import Bell, Sleeper

__all__ = ["Outcome", "Setting", "litmus", "run"]

_ROOT = Path(__file__).parents[2]
_CAPACITY = 1 << 16
_SIZES = (8, 24, 200, 200, 2048)
_PATTERN = 4096  # length of the tables of random numbers
_SPINS = 3000  # before the core is offered to the peer


class Setting(msgspec.Struct, frozen=True):
    """One round. `safety_ms` bounds a sleep, `drop` swallows every nth ring, `pin` gives each side a core."""

    messages: int
    seed: int = 1
    safety_ms: int = 100
    drop: int = 0
    pin: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """What the consumer counted. `wrong` are records out of order or damaged; `lost` is to be 0."""

    messages: int
    wrong: int
    lost: int
    sleeps: int
    rechecks: int
    safety_polls: int
    spurious: int
    rings: int
    seconds: float

    def plus(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, f) + getattr(other, f) for f in Outcome.__struct_fields__))


class _DroppingDoorbell(Doorbell):
    """Swallows every nth ring."""

    __slots__ = ("count", "every")

    def __init__(self, fd: int, every: int) -> None:
        super().__init__(fd)
        self.every = every
        self.count = 0

    def ring(self) -> None:
        self.count += 1
        if self.count % self.every:
            super().ring()


def run(setting: Setting) -> Outcome:
    """One round: the consumer in a process of its own, the producer in this one."""
    board, ring, bell = Board.create(1), Ring.create(_CAPACITY, reserved=0), Doorbell.create()
    fds = (board.segment.fd, ring.segment.fd, bell.fd)
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tools.bench.shm_stress", "--consume", *map(str, fds)]
    command += ["--setting", msgspec.json.encode(setting).decode()]
    started = time.perf_counter()
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, cwd=_ROOT) as child:
        try:
            if setting.pin:
                os.sched_setaffinity(0, cores[:1])
            doorbell = _DroppingDoorbell(bell.fd, setting.drop) if setting.drop else bell
            rings = _produce(setting, ring, Bell(board.line(0), doorbell), child)
            output, _ = child.communicate(timeout=600)
        except BaseException:
            child.kill()
            raise
        finally:
            os.sched_setaffinity(0, cores)
            for part in (board, ring, bell):
                part.close()
    if child.returncode:
        raise RuntimeError(f"the consumer ended with code {child.returncode}")
    counts: dict[str, Any] = json.loads(output)
    return Outcome(**counts, rings=rings, seconds=time.perf_counter() - started)


def _produce(setting: Setting, ring: Ring, bell: Bell, child: subprocess.Popen[bytes]) -> int:
    writer = RingWriter(ring, bell)
    rng = random.Random(setting.seed)
    jitter = [range(rng.randrange(40)) for _ in range(_PATTERN)]
    filler = [rng.randbytes(rng.choice(_SIZES) - 8) for _ in range(_PATTERN)]
    empty = writer.room
    for k in range(setting.messages):
        if k & 7 != 7:  # mostly wait until the consumer has drained everything and is about to sleep
            spins = 0
            while writer.room != empty:
                spins += 1
                if spins > _SPINS:
                    _yield(child)
            for _ in jitter[k & _PATTERN - 1]:
                pass
        record = k.to_bytes(8, "little") + filler[k & _PATTERN - 1]
        while not writer.send(record):
            _yield(child)
    return bell.rings


def _yield(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        raise RuntimeError(f"the consumer ended early with code {child.returncode}")
    os.sched_yield()


def _consume(setting: Setting, board_fd: int, ring_fd: int, bell_fd: int) -> dict[str, int]:
    if setting.pin:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    reader = RingReader(Ring.attach(ring_fd))
    sleeper = Sleeper(Board.attach(board_fd).line(0))
    doorbell = Doorbell.attach(bell_fd)
    poll = select.poll()
    poll.register(doorbell.fd, select.POLLIN)
    rng = random.Random(setting.seed + 1)
    jitter = [range(rng.randrange(120)) for _ in range(_PATTERN)]
    got = wrong = sleeps = spurious = 0
    while got < setting.messages:
        record = reader.peek()
        if record is not None:
            if int.from_bytes(record[:8], "little") != got:
                wrong += 1
            got += 1
            reader.release()
            continue
        for _ in jitter[got & _PATTERN - 1]:
            pass
        if not sleeper.announce(reader.has_data):
            continue
        sleeps += 1
        if poll.poll(setting.safety_ms):
            doorbell.drain()
            spurious += not reader.has_data()
        elif reader.has_data():
            # a producer preempted between publishing and ringing is late: only silence afterwards is a loss
            rung = bool(poll.poll(setting.safety_ms)) and doorbell.drain() > 0
            sleeper.safety_poll(reader.has_data, rung=rung)
        else:
            sleeper.safety_poll(reader.has_data, rung=False)
        sleeper.awake()
    seen = sleeper.statistics()
    return {
        "messages": got,
        "wrong": wrong,
        "lost": seen.lost,
        "sleeps": sleeps,
        "rechecks": seen.rechecks,
        "safety_polls": seen.safety_polls,
        "spurious": spurious,
    }


def litmus(iterations: int, *, fenced: bool, seed: int = 1) -> int:
    """Two processes store to their word, then load the other's: in how many iterations both loads came first.

    Without a fence the processor may do that, and then neither side of a sleep sees the other.
    """
    words = memoryview(mmap.mmap(-1, 4096)).cast("Q")
    seen = memoryview(mmap.mmap(-1, 16 * iterations)).cast("Q")
    children = []
    for me in (0, 1):
        pid = os.fork()
        if not pid:
            try:
                _store_then_load(words, seen, me, iterations, fenced, seed)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return sum(seen[k] <= k and seen[iterations + k] <= k for k in range(iterations))


def _store_then_load(
    words: memoryview, seen: memoryview, me: int, iterations: int, fenced: bool, seed: int
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if me else cores[-1]})
    mine, other = 16 + 16 * me, 32 - 16 * me
    ready, peer_ready = 48 + 16 * me, 64 - 16 * me
    rng = random.Random(seed + me)
    jitter = [range(rng.randrange(6)) for _ in range(1024)]
    for k in range(1, iterations + 1):
        words[ready] = k
        spins = 0
        while words[peer_ready] < k:
            spins += 1
            if spins > _SPINS:
                os.sched_yield()
        for _ in jitter[k & 1023]:
            pass
        if fenced:
            words[mine] = k
            fence()
            found = words[other]
        else:
            words[mine] = k
            found = words[other]
        seen[me * iterations + k - 1] = found


def _rounds(total: int, size: int, seed: int, drop: int, state: Path | None) -> Outcome:
    done = Outcome(0, 0, 0, 0, 0, 0, 0, 0, 0.0)
    if state is not None and state.exists():
        done = msgspec.json.decode(state.read_bytes(), type=Outcome)
    while done.messages < total:
        count = min(size, total - done.messages)
        setting = Setting(count, seed=seed + done.messages // size, drop=drop, pin=True)
        done = done.plus(run(setting))
        if state is not None:
            state.write_bytes(msgspec.json.encode(done))
        print(f"{done.messages:>9,} messages, {done.lost} lost, {done.sleeps:,} sleeps", flush=True)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--round", type=int, default=500_000, help="messages a round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drop", type=int, default=0, help="swallow every nth ring of the bell")
    parser.add_argument("--state", type=Path, help="a file that keeps the sums of finished rounds")
    parser.add_argument(
        "--litmus", type=int, default=0, metavar="N", help="iterations of the bare litmus test"
    )
    parser.add_argument("--consume", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consume:
        setting = msgspec.json.decode(options.setting.encode(), type=Setting)
        print(json.dumps(_consume(setting, *options.consume)))
        return 0
    if options.litmus:
        for fenced in (False, True):
            missed = litmus(options.litmus, fenced=fenced, seed=options.seed)
            print(f"{'fenced' if fenced else 'bare':>6}: both missed {missed} of {options.litmus:,}")
        return 0
    outcome = _rounds(options.messages, options.round, options.seed, options.drop, options.state)
    print(json.dumps(msgspec.to_builtins(outcome), indent=1))
    return 1 if outcome.lost or outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
