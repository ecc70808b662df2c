"""torchrun as a function: `python -m nsa.lab.process.torchrun RANKS PORT FOLDER MODULE ARG...`.

Runs `python -m MODULE ARGUMENT...` as RANKS processes of this host and leaves in FOLDER exits.json,
the exit codes of those that failed. PORT 0 finds a free one. What torchrun itself has to say is in
FOLDER/torchrun.log; the ranks keep this process's standard output and error.
"""

import json
import os
import sys
import uuid
from pathlib import Path

from nsa.lab.process.family import die_with_parent


def main(ranks: int, port: int, folder: str, module: str, *arguments: str) -> int:
    """0 when every rank ended well, else 1."""
    die_with_parent()
    # before torch makes the handlers of its loggers
    sys.stderr = open(Path(folder, "torchrun.log"), "w", buffering=1)  # noqa: SIM115
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="static" if port else "c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0} if port else {"is_host": True},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Path(folder, "exits.json").write_text(json.dumps(codes), encoding="utf-8")
        return 1
    except SignalException:
        return 1
    return 0


if __name__ == "__main__":
    ranks, port, *rest = sys.argv[1:]
    sys.exit(main(int(ranks), int(port), *rest))
