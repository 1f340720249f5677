"""An HTTP process: the application on connections that it is handed, with engines that another process keeps.

    python -P -m penstock.server.workers.worker CONTROL CONNECTIONS

CONTROL and CONNECTIONS are descriptors of sockets; what it serves comes first on the former. Its end means that the
supervising process has gone, however it went.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from penstock.engine.logs import configure_logging, flush_logs

from ..admission import ServerRefusalReason
from ..app import Common, create_app
from ..models import keeper
from ..models.served_model import ServedModel
from ..observability.metrics import Metrics
from ..settings import UsageError
from ..transport.connection_limits import TransferLimits, raise_file_limit
from ..transport.http_server import freeze, uvicorn_config
from .handed_server import HandedServer
from .link import SupervisorLink
from .plan import WorkerPlan

logger = logging.getLogger(__name__)


class WorkerServer(HandedServer):
    """Serves once it can hear the supervising process.

    Args:
        link: To that process.
        control: The socket of the link.
        arguments: See HandedServer.
        named: See HandedServer.
    """

    def __init__(self, link: SupervisorLink, control: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._link = link
        self._control = control

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, takes connections, and says so."""
        self._link.open(self._control)
        await super().startup(sockets)
        self._link.tell_serving()


def main() -> None:
    """Serves until SIGTERM, then lets running requests finish."""
    control, connections = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has shut down
    plan = WorkerPlan.receive(control)
    settings = plan.settings
    configure_logging(settings.log_level, settings.log_format)
    for name in (keeper.__name__, "uvicorn.error"):  # the supervising process tells of models, of start and end
        logging.getLogger(name).setLevel(max(logging.getLogger().level, logging.WARNING))
    raise_file_limit()

    def end() -> None:
        """Nothing can be served any more, and nobody would hear of it."""

        def leave(_: asyncio.Task[None]) -> None:
            flush_logs()
            os._exit(1)

        asyncio.get_running_loop().create_task(link.close()).add_done_callback(leave)

    def figures() -> list[Metric]:
        metrics: Metrics = app.state.context.metrics
        return metrics.families()

    def prepared() -> None:
        freeze()
        link.tell_prepared()

    link = SupervisorLink(plan, figures, end)
    models = [
        ServedModel(
            model.names,
            partial(link.engine, number),
            model.default_prompt_name,
            model.config,
            model.info,
            hidden_names=model.hidden_names,
        )
        for number, model in enumerate(plan.models)
    ]
    common = Common(plan.salt, plan.started_s, link.gather, plan.num_workers)
    try:
        app = create_app(models, settings, on_ready=prepared, common=common)
    except UsageError as error:
        logger.error("%s", error)
        raise SystemExit(error.exit_code) from error
    on_slow = partial(app.state.context.metrics.count_refusal, ServerRefusalReason.SLOW_TRANSFER)
    config, limits = uvicorn_config(app, settings), TransferLimits.of(settings)
    WorkerServer(link, control, config, connections, limits, on_slow=on_slow).run()


if __name__ == "__main__":
    main()
