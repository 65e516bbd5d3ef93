"""The gateway process."""

import asyncio
import signal

from common.logs import configure
from gateway.config import GatewayConfig
from gateway.server import GatewayServer


async def run_gateway(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT; raises ConfigError when it cannot begin."""
    configure("gateway", config.log_level, config.log_format)
    server = GatewayServer(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run()
