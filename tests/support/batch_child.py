"""Stands for the child of a batch's job, without a notebook: `python -m batch_child JOBFILE`.

It writes what it sees, and has the job's lock, until the file `end` appears beside it.
"""

import os
import signal
import sys
import time
from pathlib import Path

from whyhung.process.family import COOKIE
from workbook.runs import record
from workbook.runs.files import read_json, write_json

folder = Path(sys.argv[1]).parent
if read_json(sys.argv[1])["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
me = os.getpid()
started = {"pid": me, "pid_started": record.process_start(me), "cookie": os.environ[COOKIE]}
write_json(folder / "started.json", started | {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES")})
while not (folder / "end").exists():
    time.sleep(0.01)
