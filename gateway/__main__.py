"""``python -m gateway``."""

from common.cli import run
from gateway.config import GatewayConfig
from gateway.main import run_gateway

if __name__ == "__main__":
    run(GatewayConfig, run_gateway)
