"""A daemon of its own process around the toy pair: `python -m tests.actors.daemon`.

It prints one line of JSON with the pids whenever both cells are ready, and stops in order on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from actors.events import CellStarted, SupervisorEvent
from tests.actors.houses import House, pair


async def main(config: bytes) -> None:
    house = House(pair(config=config))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def tell(event: SupervisorEvent) -> None:
        found = house.supervisor.statistics()
        if isinstance(event, CellStarted) and set(found.cells.values()) == {"ready"}:
            print(json.dumps({name: actor.pid for name, actor in found.actors.items()}), flush=True)

    house.also = tell
    await house.supervisor.start()
    serving = asyncio.ensure_future(house.supervisor.serve())
    await stop.wait()
    await house.supervisor.stop(5.0)
    await serving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1].encode() if len(sys.argv) > 1 else b""))
