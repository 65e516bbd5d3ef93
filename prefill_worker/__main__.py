"""``python -m prefill_worker``: run one prefill worker."""

from common.cli import run
from common.messages import Role
from kvstore.host.config import WorkerConfig
from kvstore.host.host import run_worker

if __name__ == "__main__":
    run(WorkerConfig, lambda config: run_worker(config, Role.PREFILL))
