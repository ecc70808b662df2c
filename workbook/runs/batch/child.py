"""`python -m workbook.runs.batch.child JOBFILE [SECONDS]`: one job of a batch, wherever it runs."""

import math
import os
import sys
from pathlib import Path
from typing import Any

from whyhung.process.family import COOKIE
from workbook.runs import identity, record
from workbook.runs.batch.place import BUSY, FULL, locked, outcome
from workbook.runs.files import read_json, write_json
from workbook.runs.run import CUT, run_notebook


def main(file: str | Path, most_s: float | str = math.inf) -> int:
    """Run the job unless another child has it or has ended it. Exit code 0: it ran to its end.

    most_s: seconds that the place allows; the job's own timeout may be shorter.
    """
    folder = Path(file).resolve().parent
    with locked(folder / "lock") as mine:
        if not mine:
            return BUSY
        if not outcome(folder).ended:
            ended = _run(folder, read_json(file), float(most_s))
            if ended is not None:
                write_json(folder / "ended.json", ended)
        return 0 if outcome(folder).status == "ok" else 1


def _run(folder: Path, job: dict[str, Any], most_s: float) -> dict[str, Any] | None:
    """Run the job and return the content of ended.json; None if the run was cut from outside."""
    earlier = outcome(folder).run
    if earlier and record.load(earlier).get("status") == "running":  # no other process can run it
        record.close_lost(earlier, "its process or its node died, and its job was started again")
    me = os.getpid()
    started = {"pid": me, "pid_started": record.process_start(me), "machine": record.machine()}
    started |= {"cookie": os.environ.get(COOKIE), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    started["slurm"] = os.environ.get("NSA_JOB")
    write_json(folder / "started.json", started)
    if identity.source(job["notebook"]) != job["source"]:
        message = "its notebook or the package changed since the batch was planned"
        return {"status": "failed", "stop_reason": "changed", "message": message}
    # papermill's jsonschema would compile a grammar of web addresses: a second, for nothing here.
    sys.modules.setdefault("rfc3987_syntax", None)
    limit_s = min(job["timeout_s"] or math.inf, most_s)
    try:
        result = run_notebook(
            job["notebook"],
            job["parameters"],
            root=job["root"],
            timeout_s=None if limit_s == math.inf else limit_s,
            again=job["again"],
            evidence=job["evidence"],
            checked=job["checked"],
            pages=False,  # left to the driver, so that not each run has to load what draws them
            progress=False,
            began=lambda run: write_json(folder / "started.json", started | {"run": str(run)}),
            say=lambda text: print(text, flush=True),
        )
    except ValueError as error:
        return {"status": "failed", "stop_reason": "error", "message": str(error)}
    if result.stop_reason in CUT or FULL in result.message:
        return None
    return {
        "status": "ok" if result.status == "ok" else "failed",
        "run": str(result.folder.resolve()),
        "cached": result.cached,
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
