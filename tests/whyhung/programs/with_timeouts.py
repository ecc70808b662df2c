"""Run a script with torch's timeouts set: process groups' and the DataLoader's.

`python with_timeouts.py SCRIPT ARGUMENTS...`, with the seconds in HANGS_TIMEOUT.
"""

import datetime
import functools
import os
import runpy
import sys

import torch.distributed as dist
from torch.utils.data import DataLoader

SECONDS = float(os.environ["HANGS_TIMEOUT"])


def main():
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group = functools.partial(dist.init_process_group, timeout=limit)
    start = DataLoader.__init__

    def with_timeout(self, *arguments, **options):
        start(self, *arguments, **options)
        if self.num_workers and not self.timeout:
            self.timeout = SECONDS

    DataLoader.__init__ = with_timeout
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
