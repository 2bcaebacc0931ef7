"""Several servers behind one address, by Ray Serve (extra `ray`).

    serve run configs/serve/replicas.yaml

Each replica has an engine of its own, and a cost table of the machine that it runs on.
It tells Ray how many tokens a second it expects to give, and gets requests in
proportion.
The router's interface is Ray's own and still called alpha there.
"""

import argparse
import random
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcut_jax.serve.__main__ import make_engine, make_server, parse
from dcut_jax.serve.app import make_app
from dcut_jax.serve.routing import weighted_order, weights

RATE = "tokens_per_s"
REPLICA = "x-dcut-replica"  # a header of answers: who gave it
_STATS_S = 2.0
_WAITING = (
    16  # requests beyond a full queue that a replica takes, to refuse them itself
)


class ByThroughput(FIFOMixin, RequestRouter):
    """Shares requests out by what replicas expect to yield.

    One that is full is passed over for the next.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Candidates in the order in which they are to be asked."""
        rates = [replica.routing_stats.get(RATE) for replica in candidate_replicas]
        order = weighted_order(weights(rates), random.random)
        return [[candidate_replicas[i]] for i in order]


@serve.ingress()
class Replica:
    """One server.

    Args:
      flags: of `python -m dcut_jax.serve`.
    """

    def __init__(self, flags: list[str]) -> None:
        args = parse(flags)
        self.server = make_server(args, *make_engine(args))
        self.name = serve.get_replica_context().replica_id.unique_id

    def __serve_build_asgi_app__(self) -> ASGIApp:
        app = make_app(self.server)

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            async def signed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)[REPLICA] = self.name
                await send(message)

            await app(scope, receive, signed if scope["type"] == "http" else send)

        return named

    async def record_routing_stats(self) -> dict[str, Any]:
        """Asked by Ray now and then; what `ByThroughput` reads."""
        return {RATE: self.server.scheduler.watch.snapshot.get("predicted_per_s")}

    def check_health(self) -> None:
        """Asked by Ray now and then; a replica that raises is replaced."""
        if self.server.scheduler.failure:
            raise RuntimeError(f"the engine failed: {self.server.scheduler.failure}")


def build(args: dict[str, Any]) -> serve.Application:
    """An application for `serve run`, or for a file with `import_path`.

    Args:
      args: `flags`, those of `python -m dcut_jax.serve`, a list; `replicas` (1); `cpus`
        (1) and `gpus` (0) that Ray sets aside for each.

    Raises:
      ValueError: arguments or flags that do not fit.
    """
    unknown = sorted(set(args) - {"flags", "replicas", "cpus", "gpus"})
    if unknown:
        raise ValueError(
            f"expected flags, replicas, cpus and gpus, found {', '.join(unknown)}; "
            f"settings of the server go into flags"
        )
    flags = args.get("flags", [])
    if not isinstance(flags, list) or not all(isinstance(f, str) for f in flags):
        raise ValueError(
            f'expected flags to be a list of texts, as in ["--slots", "8"], found '
            f"{flags!r}"
        )
    parsed = _refuse_unfit(parse(flags))
    replica = serve.deployment(
        Replica,  # type: ignore[arg-type]
        name="dcut",
        num_replicas=int(args.get("replicas", 1)),
        max_ongoing_requests=parsed.queue + parsed.slots + _WAITING,
        graceful_shutdown_timeout_s=parsed.drain_s,
        ray_actor_options={
            "num_cpus": float(args.get("cpus", 1)),
            "num_gpus": float(args.get("gpus", 0)),
        },
        request_router_config=RequestRouterConfig(
            request_router_class=ByThroughput,
            request_routing_stats_period_s=_STATS_S,
            request_routing_stats_timeout_s=_STATS_S,
        ),
    )
    return replica.bind(flags)


def _refuse_unfit(parsed: argparse.Namespace) -> argparse.Namespace:
    if parsed.processes:
        raise ValueError(
            "a replica is one process: expected no --coordinator, --processes or "
            "--process-id; give it a --mesh of its own devices"
        )
    for name in ("host", "port"):
        if getattr(parsed, name) != getattr(parse([]), name):
            raise ValueError(
                f"--{name} is Ray's here: expected it in http_options of the file or "
                f"in `serve start`, found it among flags"
            )
    return parsed
