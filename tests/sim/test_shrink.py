"""A schedule that fails becomes a small one, told as text that fails again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mstar.simulation import shrink as shrinking
from mstar.simulation.schedule import Schedule, draw, from_text, play, to_text
from mstar.simulation.shrink import Failure, judge, report, shrink
from mstar.simulation.soak import Range, main, soak
from mstar.worker.decodes import Decodes


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decodes, "leave", lambda self, slot: None)


def _failing() -> Schedule:
    return next(schedule for schedule in map(draw, range(50)) if judge(schedule) is not None)


@pytest.mark.usefixtures("broken")
def test_a_failing_schedule_shrinks_to_few_requests_and_fails_in_the_same_way() -> None:
    schedule = _failing()
    failure = judge(schedule)
    small, same = shrink(schedule)
    assert failure is not None
    assert same.rule == failure.rule
    assert len(small.wishes) <= 3
    assert small.ranks == 1
    assert len(small.nodes) == 1
    assert judge(small) == same


@pytest.mark.usefixtures("broken")
def test_what_is_printed_of_a_failure_plays_it_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told: list[str] = []
    state = soak(Range(0, 50, 0), tell=told.append, most_failures=1)
    assert state.failed == [state.next - 1]
    assert told[0].startswith(f"seed {state.failed[0]}: ")
    command = shlex.split(told[0].splitlines()[-1])
    assert main(command[3:]) == 1
    assert capsys.readouterr().out.strip() == re.sub(r"^seed \d+: ", "", told[0].splitlines()[0])
    file = tmp_path / "schedule.json"
    file.write_text(command[-1])
    assert main(["--replay", str(file)]) == 1


def test_a_schedule_that_passes_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        shrink(draw(0))


def test_shrinking_stops_at_its_bound() -> None:
    plays = []

    def failing(schedule: Schedule) -> Failure:
        plays.append(schedule)
        return Failure("always", "it fails")

    schedule = next(schedule for schedule in map(draw, range(50)) if len(schedule.wishes) > 7)
    small, _ = shrink(schedule, failing, most=10)
    assert len(plays) == 11
    assert len(small.wishes) < len(schedule.wishes)


def test_everything_can_be_left_out_of_a_schedule_that_always_fails() -> None:
    drawn = [draw(seed) for seed in range(400)]
    schedule = next(each for each in drawn if each.ranks > 2 and len(each.nodes) > 1 and each.faults.deaths)
    small, _ = shrink(schedule, lambda schedule: Failure("always", "it fails"))
    assert not small.wishes
    assert not small.faults.deaths
    assert (small.ranks, len(small.nodes)) == (1, 1)


def test_a_range_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "state.json"
    assert main(["--from", "5", "--to", "9", "--state", str(file)]) == 0
    first = file.read_bytes()
    assert main(["--from", "5", "--to", "9", "--state", str(file)]) == 0
    assert file.read_bytes() == first
    assert capsys.readouterr().out.count("4 schedules") == 2
    with pytest.raises(SystemExit):
        main(["--from", "5", "--to", "10", "--state", str(file)])
    assert "name another file" in capsys.readouterr().err


def test_a_replay_of_a_sound_schedule_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", to_text(draw(1))]) == 0
    assert "passes" in capsys.readouterr().out


def test_a_report_names_the_seed_and_holds_the_schedule() -> None:
    schedule = draw(7)
    text = report(7, schedule, Failure("page", "Broken: page: why"))
    assert text.startswith("seed 7: Broken: page: why")
    assert from_text(shlex.split(text.splitlines()[-1])[-1]) == schedule
    assert shrinking.judge(schedule) is None
    assert play(schedule).statistics.events
