"""GraphRuntime: where each request is in the graph, as compact state by slot.

Loop counters and caps are columns over slots, so that a step of many rows moves them in a few numpy calls
(`advance`). Everything else is routed edge by edge for one slot (`complete`). Plain and synchronous: it is
told what was started, what completed and what arrived, and says which edges leave and what can run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.graph.errors import WalkStateError
from mstar.graph.masks import Masks
from mstar.graph.program import NONE, Program

__all__ = ["END_PARTITION", "PENDING", "Ended", "GraphRuntime", "Routed", "RuntimeStatistics"]

PENDING = 2**31 - 1
"""Counter of a Loop that a slot has not come to: no counter of a plan equals it, nothing is left to count."""

END_PARTITION = -2
"""What stops with a pass, instead of a Loop: the whole partition. What has not run does not run."""


class Ended(IntEnum):
    """What ended with a pass."""

    NOTHING = 0
    WALK = 1
    """The walk, or what of it runs here; what follows is for others to decide."""
    PARTITION = 2
    """The walk, and with it its partition."""


class Routed(NamedTuple):
    """What the completion of a pass leads to.

    ``edges`` leave now, each with the data of the pass; those within the walk have been delivered here.
    ``ready`` are the nodes that can run from now on. ``walk`` was entered by a local transition, else NONE.
    """

    edges: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()
    walk: int = NONE
    ended: Ended = Ended.NOTHING


class RuntimeStatistics(NamedTuple):
    """Slots in a walk by partition, and (slot, node) pairs that are ready and in flight."""

    walking: tuple[int, ...]
    ready: int
    flying: int


_NOTHING = Routed()

_latest: list[tuple[Program, Masks]] = []
"""The latest program that ran whole on one worker: its tables are the same for every runtime of it."""


def _masks_of(program: Program) -> Masks:
    if not _latest or _latest[0][0] is not program:
        _latest[:] = [(program, Masks(program))]
    return _latest[0][1]


_ZERO: NDArray[np.int32] = np.array(0, np.int32)
_ONE: NDArray[np.int32] = np.array(1, np.int32)


class _Turn(NamedTuple):
    """What a completion makes of the Loops around a place: those that end, innermost first, and the one
    that goes on, each with its counter.
    """

    ended: tuple[int, ...]
    again: int
    counters: tuple[tuple[int, int], ...]


class GraphRuntime:
    """State of ``slots`` slots over ``program``, for the nodes in ``here`` (None: all of them).

    ``counter`` and ``cap`` are int32 [loops, slots]: how far each Loop has come, PENDING until its walk is
    entered, and where it ends, 0 until that is set. ``walk`` is int32 [partitions, slots], the walk that a
    slot is in or NONE. ``ready`` is bool [nodes, slots]. Others may keep views of these arrays: they
    are never replaced. A call that raises WalkStateError has changed nothing.
    """

    def __init__(self, program: Program, slots: int, here: Collection[int] | None = None) -> None:
        self.program = program
        self.slots = slots
        loops, partitions = len(program.loops), len(program.partitions)
        self.counter: NDArray[np.int32] = np.full((loops, slots), PENDING, np.int32)
        self.cap: NDArray[np.int32] = np.zeros((loops, slots), np.int32)
        self.walk: NDArray[np.int32] = np.full((partitions, slots), NONE, np.int32)
        self.ready: NDArray[np.bool_] = np.zeros((len(program.nodes), slots), bool)
        self._start: NDArray[np.int32] = np.repeat(program.loop.start[:, None], slots, axis=1)
        self._counters, self._caps = list(self.counter), list(self.cap)
        self._masks = _masks_of(program) if here is None else Masks(program, here)
        # Bitsets by slot: nodes in flight; by partition and slot: ports filled, places done, Loops stopped.
        self._flying = [0] * slots
        self._filled = [[0] * slots for _ in range(partitions)]
        self._done = [[0] * slots for _ in range(partitions)]
        self._stopped = [[0] * slots for _ in range(partitions)]

    # ---- a request comes and goes ------------------------------------------------------------

    def set_loop_caps(
        self, slot: int, caps: Mapping[int, int], counted: Mapping[int, int] | None = None
    ) -> None:
        """Set where Loops of ``slot`` end: Loop id -> cap.

        ``counted`` is what an earlier attempt of the request counted in a Loop, which then begins that
        much later. A cap is above its Loop's start, unless the Loop is a whole walk, which is not
        entered then. Raises WalkStateError.
        """
        for loop, count in (counted or {}).items():
            if count < 0 or self.counter[loop, slot] != PENDING:
                raise WalkStateError(
                    f"slot {slot}: {count} counted before Loop {self._loop(loop)}; give 0 or more, before "
                    "its walk is entered"
                )
        starts = {loop: self._start_of(loop, slot, counted or {}) for loop in (*caps, *(counted or {}))}
        for loop, cap in caps.items():
            counter = int(self.counter[loop, slot])
            least = starts[loop] + 1 if counter == PENDING else counter
            if self._masks.gate[self._masks.loop_walk[loop]] == loop and counter == PENDING:
                least = 1
            if cap < least or cap >= PENDING:
                raise WalkStateError(
                    f"slot {slot}: the cap of Loop {self._loop(loop)} is {cap}; give {least} to {PENDING - 1}"
                )
        for loop, cap in caps.items():
            self.cap[loop, slot] = cap
        for loop, start in starts.items():
            self._start[loop, slot] = start

    def admit(self, slot: int, walk: int, ports: Collection[int] | None = None) -> tuple[int, ...]:
        """``slot`` enters ``walk``; returns the nodes that can run at once.

        ``ports`` are those of its inputs from outside that are there already, by default all of them but
        streams and what other workers make; the rest is delivered as it arrives. Raises WalkStateError
        where the partition is in a walk already or has a node in flight, and where nothing is left to do.
        """
        masks = self._masks
        partition = masks.partition[walk]
        what = f"slot {slot} enters walk {self.program.walks[walk]!r}"
        now = int(self.walk[partition, slot])
        if now != NONE:
            raise WalkStateError(f"{what}, but is in {self.program.walks[now]!r}; drop it or end that first")
        late = self._flying[slot] & masks.nodes_of[partition]
        if late:
            names = [name for name, bit in zip(self.program.nodes, masks.node_bit, strict=True) if late & bit]
            raise WalkStateError(f"{what}, but {', '.join(names)} of the walk before is still in flight")
        if masks.elsewhere[walk] == masks.all_places[walk]:
            raise WalkStateError(f"{what}, but none of its nodes run here")
        if self._is_spent(slot, walk):
            raise WalkStateError(f"{what}, but the cap of its Loop is reached before it begins")
        filled = masks.initial[walk]
        if ports is not None:
            filled = 0
            for port in ports:
                if masks.port_walk[port] != walk or not masks.outside[port]:
                    name = self.program.port_names[port]
                    raise WalkStateError(f"{what} with {name!r}, which is no input of it from outside")
                filled |= masks.port_bit[port]
        return self._enter(slot, walk, filled)

    def drop(self, slot: int) -> None:
        """Forget ``slot``, whatever it is at; a free slot stays free."""
        for bits in (*self._filled, *self._done, *self._stopped, self._flying):
            bits[slot] = 0
        self.walk[:, slot] = NONE
        self.ready[:, slot] = False
        self.counter[:, slot] = PENDING
        self.cap[:, slot] = 0
        self._start[:, slot] = self.program.loop.start

    # ---- one slot ----------------------------------------------------------------------------

    def wants(self, slot: int, port: int) -> bool:
        """Whether ``slot`` can be given a value for ``port``: it waits for one, or will in its next pass.

        A row in the middle of its chunks wants none, so that what arrives meanwhile can't start it twice.
        """
        masks = self._masks
        walk, place = masks.port_walk[port], masks.port_place[port]
        partition = masks.partition[walk]
        if self.walk[partition, slot] != walk or not masks.outside[port]:
            return False
        if self._filled[partition][slot] & masks.port_bit[port]:
            return False
        begun = (
            self._flying[slot] & masks.node_bit[masks.node[place]]
            or self._done[partition][slot] & masks.place_bit[place]
        )
        return not begun or (masks.loop[place] != NONE and bool(masks.streams[place] & masks.port_bit[port]))

    def deliver(self, slot: int, port: int) -> int:
        """A value for ``port`` arrived from outside; returns the node if that makes it ready, else NONE.

        A node in flight is not made ready again: what arrives is for its next pass. Raises
        WalkStateError for what the slot doesn't want.
        """
        masks = self._masks
        if not self.wants(slot, port):
            now = int(self.walk[masks.partition[masks.port_walk[port]], slot])
            where = f"is in walk {self.program.walks[now]!r}" if now != NONE else "is in no walk"
            raise WalkStateError(
                f"slot {slot} {where} and wants no value for {self.program.port_names[port]!r}: it has one, "
                "has used it, or makes it itself"
            )
        place = masks.port_place[port]
        partition = masks.partition[masks.port_walk[port]]
        self._filled[partition][slot] |= masks.port_bit[port]
        return masks.node[place] if self._wake(slot, partition, place) else NONE

    def start(self, slot: int, node: int) -> None:
        """``node`` is in flight from now on. Raises WalkStateError unless it is ready."""
        masks = self._masks
        if not self.ready[node, slot]:
            flying = self._flying[slot] & masks.node_bit[node]
            why = "it is in flight already" if flying else "its inputs are not there, or it has run"
            raise WalkStateError(f"slot {slot}: node {self.program.nodes[node]!r} can't start, {why}")
        partition = masks.partition_of_node[node]
        place = masks.place_of[int(self.walk[partition, slot])][node]
        self.ready[node, slot] = False
        self._flying[slot] |= masks.node_bit[node]
        self._filled[partition][slot] &= ~masks.streams[place]

    def complete(
        self,
        slot: int,
        node: int,
        outputs: Collection[int] | None = None,
        *,
        stride: int = 1,
        stop: int = NONE,
    ) -> Routed:
        """``node``, which is in flight, has run and made ``outputs`` (output ids; None: all of them).

        A pass may go without what is for the client or a stream. ``stride`` is how many tokens it ran
        where its Loop counts them. ``stop`` is a Loop around it that ends with this iteration, before its
        cap, or END_PARTITION. A node whose partition ended meanwhile completes without effect. Raises
        WalkStateError.
        """
        masks = self._masks
        partition = masks.partition_of_node[node]
        if not self._lands(slot, node):
            return _NOTHING
        walk = int(self.walk[partition, slot])
        place = masks.place_of[walk][node]
        loop = masks.loop[place]
        if stride != 1 and (loop == NONE or not masks.counts_tokens[loop] or stride < 1):
            raise WalkStateError(
                f"slot {slot}: node {self.program.nodes[node]!r} moves on by {stride}; give 1, or more in a "
                "Loop that counts tokens"
            )
        return self._complete(slot, walk, place, outputs, stride, stop)

    # ---- many slots --------------------------------------------------------------------------

    def advance(
        self, loop: int, slots: NDArray[np.int64], strides: NDArray[np.int32] | int = 1
    ) -> NDArray[np.bool_]:
        """Move ``loop`` on by ``strides`` in ``slots``; returns which of them reached the cap, bool [n].

        ``slots`` is int64 [n], all different; ``strides`` int32 [n], or one number for all. The body of
        the Loop is one node, which stays in flight until `finish` is called for the rows that reached
        their cap or stop. Nothing is routed: the edges that leave with every iteration leave in each
        row. Raises WalkStateError for a Loop that was not entered or would pass its cap.
        """
        counters = self._counters[loop]
        counter = counters[slots]
        left = self._caps[loop][slots] - counter
        # PENDING leaves less than nothing, so that this also finds a Loop that was not entered.
        if isinstance(strides, int):
            step = _ONE if strides == 1 else np.array(strides, np.int32)
            moves = strides > 0
        else:
            step = strides
            moves = np.count_nonzero(step > _ZERO) == step.size
        if not moves or np.count_nonzero(left >= step) != left.size or self._masks.only_place[loop] == NONE:
            raise self._past_cap(loop, slots, strides)
        counter += step
        counters[slots] = counter
        finished: NDArray[np.bool_] = left == step
        return finished

    def finish(
        self, slot: int, loop: int, outputs: Collection[int] | None = None, *, stop: int = NONE
    ) -> Routed:
        """The last iteration of ``loop``, which `advance` moves, has run: route it as `complete` does.

        The counter is at the cap, or ``stop`` ends the Loop earlier. Raises WalkStateError.
        """
        masks = self._masks
        place, walk = masks.only_place[loop], masks.loop_walk[loop]
        if place == NONE:
            raise self._no_column(loop)
        if not self._lands(slot, masks.node[place]):
            return _NOTHING
        now = int(self.walk[masks.partition[walk], slot])
        counter, cap = int(self.counter[loop, slot]), int(self.cap[loop, slot])
        if now != walk or (counter != cap and stop == NONE):
            raise WalkStateError(
                f"slot {slot}: Loop {self._loop(loop)} finished in walk {self.program.walks[now]!r} at "
                f"{counter} of {cap}; it ends in its own walk at its cap, or with a stop"
            )
        return self._complete(slot, walk, place, outputs, 0, stop)

    # ---- routing -----------------------------------------------------------------------------

    def _lands(self, slot: int, node: int) -> bool:
        """Check that ``node`` is in flight; False, and it is no more, where its partition has ended."""
        masks = self._masks
        bit = masks.node_bit[node]
        if not self._flying[slot] & bit:
            raise WalkStateError(
                f"slot {slot}: node {self.program.nodes[node]!r} has run, but was not started"
            )
        if self.walk[masks.partition_of_node[node], slot] != NONE:
            return True
        self._flying[slot] &= ~bit
        return False

    def _complete(
        self, slot: int, walk: int, place: int, outputs: Collection[int] | None, stride: int, stop: int
    ) -> Routed:
        """Route the completion of ``place``; ``stride`` 0: its Loop has been moved already."""
        masks = self._masks
        partition, node = masks.partition[walk], masks.node[place]
        stopped = self._stopped[partition][slot]
        if stop != NONE:
            stopped |= self._check_stop(slot, walk, place, stride, stop)
        done = self._done[partition][slot] | masks.place_bit[place]
        turn = self._turn(slot, place, done, stopped, stride)
        edges = self._edges(slot, place, outputs, turn)

        self._flying[slot] &= ~masks.node_bit[node]
        self._done[partition][slot] = done
        self._stopped[partition][slot] = stopped
        for loop, counter in turn.counters:
            self.counter[loop, slot] = counter
        if turn.ended:
            self._filled[partition][slot] &= ~masks.kept_streams[place]
        if stop == END_PARTITION:
            return self._end_partition(slot, walk, edges)
        ready: list[int] = []
        for edge in edges:
            if masks.delivers[edge]:
                port = masks.edge_port[edge]
                target = masks.port_place[port]
                self._filled[partition][slot] |= masks.port_bit[port]
                if self._wake(slot, partition, target):
                    ready.append(masks.node[target])
        if turn.again != NONE:
            self._repeat(slot, partition, turn.again, ready)
        elif done == masks.all_places[walk]:
            return self._end_walk(slot, walk, edges)
        return Routed(tuple(edges), tuple(ready))

    def _turn(self, slot: int, place: int, done: int, stopped: int, stride: int) -> _Turn:
        """Which Loops around ``place`` end with what is ``done``, and which has another iteration."""
        masks = self._masks
        ended: list[int] = []
        counters: list[tuple[int, int]] = []
        loop = masks.loop[place]
        while loop != NONE and done & masks.body[loop] == masks.body[loop]:
            before, cap = int(self.counter[loop, slot]), int(self.cap[loop, slot])
            counter = before + stride
            if counter > cap:
                raise self._beyond(slot, loop, before, cap, stride)
            counters.append((loop, counter))
            if counter < cap and not stopped & masks.loop_bit[loop]:
                return _Turn(tuple(ended), loop, tuple(counters))
            ended.append(loop)
            loop, stride = masks.parent[loop], 1
        return _Turn(tuple(ended), NONE, tuple(counters))

    def _edges(self, slot: int, place: int, outputs: Collection[int] | None, turn: _Turn) -> list[int]:
        """The edges that leave with a completion. Raises WalkStateError for what can't go missing."""
        masks = self._masks
        edges: list[int] = []
        back = masks.back_edges[turn.again] if turn.again != NONE else ()
        for edge in chain(masks.place_edges[place], *(masks.loop_edges[loop] for loop in turn.ended), back):
            if outputs is None or masks.edge_place[edge] != place or masks.edge_output[edge] in outputs:
                edges.append(edge)
            elif not masks.leaves[edge]:
                raise WalkStateError(
                    f"slot {slot}: a pass of node {self.program.nodes[masks.node[place]]!r} made nothing for "
                    f"{self.program.edge_names[edge]!r}, which is waited for"
                )
        return edges

    def _repeat(self, slot: int, partition: int, loop: int, ready: list[int]) -> None:
        """Begin the next iteration of ``loop``: what it makes is due again; the rest is there already."""
        masks = self._masks
        self._done[partition][slot] &= ~masks.body[loop]
        self._stopped[partition][slot] &= ~masks.within[loop]
        self._filled[partition][slot] &= ~masks.renewed[loop]
        for inner in masks.inner[loop]:
            self.counter[inner, slot] = self._start[inner, slot]
        ready += (masks.node[place] for place in masks.places[loop] if self._wake(slot, partition, place))

    def _wake(self, slot: int, partition: int, place: int) -> bool:
        """Make the node of ``place`` ready if all it needs is there and it is idle; whether that was so."""
        masks = self._masks
        needs, node = masks.needs[place], masks.node[place]
        if self._filled[partition][slot] & needs != needs or self.ready[node, slot]:
            return False
        if self._flying[slot] & masks.node_bit[node] or self._done[partition][slot] & masks.place_bit[place]:
            return False
        self.ready[node, slot] = True
        return True

    # ---- walks -------------------------------------------------------------------------------

    def _enter(self, slot: int, walk: int, filled: int) -> tuple[int, ...]:
        masks = self._masks
        partition = masks.partition[walk]
        self.walk[partition, slot] = walk
        self._filled[partition][slot] = filled
        self._done[partition][slot] = masks.elsewhere[walk]
        for loop in masks.loops_of_walk[walk]:
            self.counter[loop, slot] = self._start[loop, slot]
        if filled == masks.initial[walk]:
            for node in masks.ready_nodes[walk]:
                self.ready[node, slot] = True
            return masks.ready_nodes[walk]
        return tuple(
            masks.node[place] for place in masks.places_of_walk[walk] if self._wake(slot, partition, place)
        )

    def _leave(self, slot: int, walk: int) -> None:
        partition = self._masks.partition[walk]
        self.walk[partition, slot] = NONE
        self._filled[partition][slot] = self._done[partition][slot] = self._stopped[partition][slot] = 0
        for node in self._masks.nodes_in[walk]:
            self.ready[node, slot] = False

    def _end_walk(self, slot: int, walk: int, edges: list[int]) -> Routed:
        """All of the walk has run here: go on to the next one where that is ours to decide."""
        masks = self._masks
        following = masks.next[walk]
        if following == NONE:
            ended = Ended.WALK if masks.open[walk] or masks.leads[walk] else Ended.PARTITION
            self._leave(slot, walk)
            return Routed(tuple(edges), (), NONE, ended)
        if self._is_spent(slot, following):
            return self._end_partition(slot, walk, edges)
        self._leave(slot, walk)
        return Routed(tuple(edges), self._enter(slot, following, masks.initial[following]), following)

    def _end_partition(self, slot: int, walk: int, edges: list[int]) -> Routed:
        """Nothing runs here any more; only what is for others still leaves."""
        self._leave(slot, walk)
        leaving = tuple(edge for edge in edges if self._masks.leaves[edge])
        return Routed(leaving, (), NONE, Ended.PARTITION)

    def _is_spent(self, slot: int, walk: int) -> bool:
        """Whether the Loop that is all of ``walk`` has nothing to count: a budget that a prefill used up."""
        gate = self._masks.gate[walk]
        return gate != NONE and 0 < int(self.cap[gate, slot]) <= int(self._start[gate, slot])

    # ---- checks ------------------------------------------------------------------------------

    def _check_stop(self, slot: int, walk: int, place: int, stride: int, stop: int) -> int:
        """The Loops that ``stop`` ends, as bits. Raises WalkStateError where it can't be given here."""
        masks = self._masks
        node = self.program.nodes[masks.node[place]]
        if stop == END_PARTITION and not masks.may_end[walk]:
            raise WalkStateError(
                f"slot {slot}: node {node!r} ends its partition in walk {self.program.walks[walk]!r}, which "
                "is not declared to"
            )
        bits, loop = 0, masks.loop[place]
        while loop not in (NONE, stop):
            at, cap = int(self.counter[loop, slot]) + stride, int(self.cap[loop, slot])
            if masks.counts_tokens[loop] and at < cap:
                raise WalkStateError(
                    f"slot {slot}: node {node!r} stops at {at} of {cap} tokens of its input; only the final "
                    "chunk gives a token that can"
                )
            bits |= masks.loop_bit[loop]
            loop, stride = masks.parent[loop], 1
        if loop == NONE and stop != END_PARTITION:
            raise WalkStateError(
                f"slot {slot}: node {node!r} stops Loop {self._loop(stop)}, which it is not in"
            )
        return bits | (masks.loop_bit[loop] if loop != NONE else 0)

    def _past_cap(
        self, loop: int, slots: NDArray[np.int64], strides: NDArray[np.int32] | int
    ) -> WalkStateError:
        """Name the first row that does not fit."""
        rows = zip(slots.tolist(), np.broadcast_to(strides, slots.shape).tolist(), strict=True)
        for slot, stride in rows:
            before, cap = int(self.counter[loop, slot]), int(self.cap[loop, slot])
            if not 1 <= stride <= cap - before:
                return self._beyond(slot, loop, before, cap, stride)
        return self._no_column(loop)

    def _no_column(self, loop: int) -> WalkStateError:
        return WalkStateError(
            f"Loop {self._loop(loop)} is not one node that repeats; complete the nodes in it one by one"
        )

    def _beyond(self, slot: int, loop: int, before: int, cap: int, stride: int) -> WalkStateError:
        if before == PENDING:
            return WalkStateError(f"slot {slot} moves Loop {self._loop(loop)}, but has not come to it")
        most = f"1 to {cap - before}" if cap > before else "no further"
        return WalkStateError(
            f"slot {slot}: Loop {self._loop(loop)} is at {before} of {cap} and moves by {stride}; "
            f"it may move {most}"
        )

    def _start_of(self, loop: int, slot: int, counted: Mapping[int, int]) -> int:
        if loop in counted:
            return int(self.program.loop.start[loop]) + counted[loop]
        return int(self._start[loop, slot])

    def _loop(self, loop: int) -> str:
        return repr(self.program.loops[loop]) if 0 <= loop < len(self.program.loops) else str(loop)

    def statistics(self) -> RuntimeStatistics:
        """Counts at this moment."""
        walking: list[int] = (self.walk != NONE).sum(axis=1).tolist()
        flying = sum(bits.bit_count() for bits in self._flying)
        return RuntimeStatistics(tuple(walking), int(np.count_nonzero(self.ready)), flying)
