"""What the server says of itself: live, ready, models, status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from actors.errors import ActorsError
from mstar.gateway.errors import not_ready, starting
from mstar.gateway.service import Service
from shm.slab import SlabOwner

if TYPE_CHECKING:
    from mstar.config.schema import GatewayConfig

__all__ = ["Health"]


class Health:
    """Answers the questions that clients and operators ask; the same over HTTP and the native protocol."""

    def __init__(self, service: Service, config: GatewayConfig) -> None:
        self._service = service
        self._config = config

    def models(self) -> dict[str, Any]:
        """The list of models, in OpenAI's shape."""
        return {"object": "list", "data": [self.model(name) for name in self._service.intake.names]}

    def model(self, name: str) -> dict[str, Any]:
        """One model of that list."""
        intake = self._service.intake
        return {
            "id": name,
            "object": "model",
            "created": self._config.created,
            "owned_by": "mstar",
            "root": self._config.model_name,
            "max_model_len": intake.limits.window,
        }

    def ready(self) -> dict[str, Any]:
        """Whether requests are taken. Raises ApiError 503 with the stage of each rank while they are not."""
        service = self._service
        stages = service.stages()
        if service.draining:
            raise not_ready("The server is stopping.", "draining")
        if not service.open:
            raise starting(service.stage())
        return {"ready": True, "stage": "running", "ranks": stages}

    async def status(self) -> dict[str, Any]:
        """Everything: the daemon and its actors as the supervisor sees them, and this gateway's figures."""
        service, config = self._service, self._config
        statistics = service.statistics()
        found: dict[str, Any] = {
            "pid": config.daemon_pid,
            "model": config.model_name,
            "served_model_names": list(service.intake.names),
            "max_model_len": service.intake.limits.window,
            "uds": config.uds_path,
            "port": config.tcp_port,
            "created": config.created,
            "ready": service.open,
            "draining": service.draining,
            "stages": service.stages(),
            "requests": {
                "live": statistics.book.requests,
                "sequences": statistics.book.sequences,
                "capacity": config.deployment.max_concurrent_requests,
                "outcomes": statistics.book.outcomes,
                "refused": {str(status): count for status, count in statistics.refused.items()},
                "stale_rows": statistics.book.stale,
                "slow_readers": statistics.slow_readers,
            },
            "ranks": {
                rank: msgspec.to_builtins(msgspec.structs.asdict(report))
                for rank, report in statistics.reports.items()
            },
            "rings": self._rings(),
            "context": plain(service.ctx.statistics()),
        }
        found["daemon"] = await self._daemon()
        found["actors"] = found["daemon"].get("actors", [])
        return found

    async def _daemon(self) -> dict[str, Any]:
        """The supervisor's figures; what it could not say must not hide the rest."""
        try:
            answer = msgspec.json.decode(await self._service.ctx.ask("status", b""), type=dict[str, Any])
        except (ActorsError, msgspec.DecodeError) as error:
            return {"error": str(error)}
        return answer

    def _rings(self) -> dict[str, Any]:
        ctx = self._service.ctx
        rings: dict[str, Any] = {name: plain(ring.statistics()) for name, ring in ctx.outbox.items()}
        rings.update({name: plain(ring.statistics()) for name, ring in ctx.inbox.items()})
        rings.update(
            {
                name: plain(slab.statistics())
                for name, slab in ctx.slabs.items()
                if isinstance(slab, SlabOwner)
            }
        )
        return rings


def plain(value: Any) -> Any:
    """A snapshot, and those inside it, as plain maps and lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(one) for name, one in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return value
