"""The supervisor with real processes: start, stages, messages, stop."""

from __future__ import annotations

import pytest

from tests.actors.houses import House, pair, running
from tests.helpers import wait_until_async


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("caller", ["Caller", "ServedCaller"])
async def test_two_actors_exchange_messages(caller: str, loop: str) -> None:
    async with running(House(pair(caller), loop=loop)) as house:
        await wait_until_async(lambda: house.echoed()[0] > 100)
        assert house.echoed()[1] == house.pid("echo")
        assert house.report("caller", "events") == "ready echo of echos in generation 1"
    assert house.supervisor.statistics().actors["echo"].state == "waiting"
