"""What a wiring refuses, and what it derives."""

from __future__ import annotations

import msgspec
import pytest

from actors.errors import WiringError
from actors.wiring import MAX_LINKS, ActorSpec, ChannelSpec, SlabSpec, StepSpec, Wiring
from tests.actors.houses import pair, toy

LAYOUT = (4, 4, 64, 4, 1)


def test_cells_and_peers_follow_from_the_declaration() -> None:
    wiring = Wiring(
        actors=(toy("a", "Echo", cell="x"), toy("b", "Echo", cell="y"), toy("c", "Echo", cell="y")),
        channels=(ChannelSpec("ab", "a", "b", 4096),),
        slabs=(SlabSpec("s", "a", ("b", "c"), ((4096, 1),)),),
        steps=(StepSpec("t", "b", ("c",), LAYOUT),),
    )
    wiring.check()
    assert wiring.cells() == {"x": ("a",), "y": ("b", "c")}
    assert wiring.peers("a") == {"b", "c"}
    assert wiring.peers("c") == {"a", "b"}


def test_actors_that_face_the_outside_stop_first_unless_told_otherwise() -> None:
    spec = ActorSpec("a", "x", "m:C")
    assert (spec.phase, msgspec.structs.replace(spec, fds={"http": 3}).phase) == (1, 0)
    assert msgspec.structs.replace(spec, stop_phase=7, fds={"http": 3}).phase == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actors": ()}, "at least one actor"),
        ({"actors": (toy("echo", "Echo"), toy("echo", "Echo"))}, "'echo' is declared 2 times"),
        ({"actors": (ActorSpec("echo", "x", "toys.Echo"),)}, "must read 'package.module:Class'"),
        ({"channels": (ChannelSpec("c", "caller", "nobody", 4096),)}, "'nobody', which is not one of"),
        ({"channels": (ChannelSpec("c", "echo", "echo", 4096),)}, "names an actor twice"),
        ({"channels": (ChannelSpec("c", "caller", "echo", 4096),) * 2}, "channel 'c' is declared 2 times"),
        ({"steps": (StepSpec("s", "caller", ("echo",), LAYOUT),)}, "leaves the cell of its leader 'caller'"),
        ({"stage_timeout": 0.0}, "more than 0 seconds, not 0"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        msgspec.structs.replace(pair(), **change).check()


def test_a_slab_may_not_tie_two_foreign_cells_together() -> None:
    actors = tuple(toy(name, "Echo") for name in ("owner", "one", "two"))
    slab = SlabSpec("s", "owner", ("one", "two"), ((4096, 1),))
    with pytest.raises(WiringError, match=r"users in the cells \['ones', 'twos'\].*one slab per cell"):
        Wiring(actors=actors, slabs=(slab,)).check()


def test_an_actor_shares_no_more_than_one_datagram_can_hand_over() -> None:
    many = tuple(ChannelSpec(f"c{i}", "caller", "echo", 4096) for i in range(MAX_LINKS + 1))
    with pytest.raises(WiringError, match=f"shares {MAX_LINKS + 1} objects; at most {MAX_LINKS}"):
        msgspec.structs.replace(pair(), channels=many).check()
