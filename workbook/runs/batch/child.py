"""`python -m workbook.runs.batch.child JOBFILE [SECONDS]`: one job of a batch, wherever it runs.

It holds the job's lock, which it inherits from the process that starts it.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

from workbook.runs import identity, record
from workbook.runs.batch.state import ENDED, OK, Job, is_cut
from workbook.runs.files import write_json
from workbook.runs.run import run_notebook


def main(file: str | Path, most_s: float | str = math.inf) -> int:
    """Run the job unless an earlier child has ended it. Exit code 0: it ran to its end.

    most_s: seconds that the place allows; the job's own timeout may be shorter.
    """
    job = Job("", Path(file).resolve().parent)
    asked = job.says("job")  # nothing, if it was taken back while this child was in a queue
    if asked and job.look() not in ENDED and (ended := _run(job, asked, float(most_s))):
        write_json(job.folder / "ended.json", ended)
    return 0 if job.look() == OK else 1


def _run(job: Job, asked: dict[str, Any], most_s: float) -> dict[str, Any] | None:
    """Run the job and return the content of ended.json; None if the run was cut from outside."""
    job.close("its process or its node died, and its job was started again")
    me = os.getpid()
    started = {
        "pid": me,
        "pid_started": record.process_start(me),
        "slurm": os.environ.get("NSA_JOB"),
    }
    write_json(job.folder / "started.json", started)
    if identity.source(asked["notebook"]) != asked["source"]:
        message = "its notebook or the package changed since the batch was planned"
        return {"status": "failed", "stop_reason": "changed", "message": message}
    # papermill's jsonschema would compile a grammar of web addresses: a second, for nothing here.
    sys.modules.setdefault("rfc3987_syntax", None)
    limit_s = min(asked["timeout_s"] or math.inf, most_s)
    try:
        result = run_notebook(
            asked["notebook"],
            asked["parameters"],
            root=asked["root"],
            timeout_s=None if limit_s == math.inf else limit_s,
            again=asked["again"],
            evidence=asked["evidence"],
            checked=asked["checked"],
            pages=False,  # left to the driver, so that not each run has to load what draws them
            progress=False,
            began=lambda run: write_json(job.folder / "started.json", started | {"run": str(run)}),
            say=lambda text: print(text, flush=True),
        )
    except ValueError as error:
        return {"status": "failed", "stop_reason": "error", "message": str(error)}
    if is_cut(result.stop_reason, result.message):
        return None
    status = "ok" if result.status == "ok" else "failed"
    return {"status": status, "run": str(result.folder.resolve()), "cached": result.cached}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
