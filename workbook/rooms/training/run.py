"""Run folder of a training job: how its record is written, and how the job's end is reported.

`runs/<date>/train-<id>/` holds job.json, environment.json, record.json and, for each rank, its log,
its state and its heartbeats. With `nsa train --ranks 2` a supervisor writes the record, however the
ranks end. Under a user's own torchrun, or alone, rank 0 writes it, or if it is killed, any
remaining rank; if none is left, the record's heartbeat stops and the run shows as lost.
"""

import contextlib
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyhung.process.family import PARENT, die_with_parent
from workbook.rooms.training.ranks import Failure, accounted, first_failure, logged, one_line
from workbook.runs import environment, opening
from workbook.runs.files import read_json, write_json
from workbook.runs.record import STATUS_OF, Record
from workbook.runs.signals import Terminated, termination_is_an_exception

if TYPE_CHECKING:
    from workbook.rooms.training.job import Job

MODULE = "workbook.rooms.training.run"  # `python -m MODULE FOLDER`: one rank of the job in it


@dataclass(frozen=True)
class Ended:
    """End of a job: the record's status, and the first rank to fail with its message. `result`
    covers the job as far as it got; its `stop` has the reason for an orderly stop: a halt file,
    whose job is "ok", or a guard."""

    folder: Path
    status: str
    message: str = ""
    failure: Failure | None = None
    result: dict[str, Any] = field(default_factory=dict)


def make_folder(
    job: "Job",
    argv: list[str],
    runs: str,
    given: str | None,
    preflight: dict[str, Any] | None = None,
) -> Path:
    """Create the run's folder with job.json, environment.json and the `preflight` findings. Raises
    ValueError if it cannot be written, or `given` holds a run already."""
    facts, content = environment.snapshot(job.seed), job.to_dict()
    if given is None:
        spec = json.dumps([content, facts.get("git")], sort_keys=True, default=str)
        name = f"train-{hashlib.sha256(spec.encode()).hexdigest()[:8]}"
        folder = opening.create_folder(runs, name)
    else:
        folder = Path(given)
        if (folder / "record.json").exists():
            raise ValueError(f"--into {given} holds a run already; name a new folder, or none")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--into {given} cannot be made: {error.strerror}") from None
    write_json(folder / "job.json", {"argv": argv, **content})
    write_json(folder / "environment.json", facts)
    if preflight is not None:
        write_json(folder / "preflight.json", preflight)
    return folder


def supervise(job: "Job", folder: Path, port: int | None) -> Ended:
    """Run the job's ranks under torchrun, in separate processes, and write the record. Ctrl-C and
    SIGTERM end them all and are recorded. Raises ValueError for a port in use."""
    from workbook.rooms.training import ranks

    record, codes, stopped = _record(folder), {}, ""
    try:
        with termination_is_an_exception():
            codes = ranks.launch(
                MODULE, [str(folder.resolve())], ranks=job.ranks, folder=folder, port=port
            )
    except Terminated:
        stopped = "terminated"
    except KeyboardInterrupt:
        stopped = "interrupted"
    finally:
        ended = _close(record, folder, job.ranks, codes, stopped)
    return ended


def alone(job: "Job", folder: Path) -> Ended:
    """Run the job in this process."""
    record = _record(folder)

    def close() -> Ended:
        ended = _close(record, folder, 1)
        if ended.status == STATUS_OF["terminated"]:  # after which this process ends at once
            line = f"nsa: {ended.message}; {folder} holds what there is"
            print(line, file=sys.stderr, flush=True)
        return ended

    with contextlib.suppress(Exception, KeyboardInterrupt), logged(folder, 0, console=True):
        _rank(job, folder, 0, close)
    return close()


def under_torchrun(job: "Job", argv: list[str], **places: Any) -> Ended:
    """Run this rank of a job started by a user's torchrun; rank 0 makes the folder, by
    `make_folder(job, argv, **places)`, and the record.
    A rank that fails ends its process instead of returning to a caller that might block."""
    from torch.distributed import broadcast_object_list

    os.environ.pop(PARENT, None)  # the process that started torchrun, if it is one of ours
    die_with_parent()
    place = job.join()
    everyone = [str(make_folder(job, argv, **places)) if place.rank == 0 else None]
    broadcast_object_list(everyone, src=0)
    folder = Path(everyone[0])
    record = _record(folder) if place.rank == 0 else None
    close = partial(_close, record, folder, place.ranks)
    try:
        with logged(folder, place.rank, console=place.rank == 0):
            result = _rank(job, folder, place.rank, close, place)
    except BaseException as error:
        end_process(error, place.rank)
    if record is not None:
        return close()
    return Ended(folder, STATUS_OF[result.get("stop", {"reason": "ok"})["reason"]])


def supervised_rank(folder: Path) -> None:
    """Run a rank that `supervise` started."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    try:
        with logged(folder, rank, console=rank == 0):
            from workbook.rooms.training.job import Job

            content = read_json(folder / "job.json")
            content.pop("argv")
            job = Job.from_dict(content)
            _rank(job, folder, rank, lambda: None)
    except BaseException as error:
        end_process(error)


def end_process(error: BaseException, rank: int | None = None) -> None:
    """End this process at once: leaving a group whose members may be gone can block forever."""
    bad_input = isinstance(error, ValueError | ModuleNotFoundError)
    if rank == 0:
        print(f"nsa: {one_line(error)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if bad_input else 1)


def _rank(
    job: "Job", folder: Path, rank: int, when_ended: Callable[[], Any], place: Any = None
) -> dict[str, Any]:
    """Train as one rank, which joins the others unless `place` is given."""
    from workbook.rooms.training import job as training_job

    with accounted(folder, rank, when_ended) as told:
        try:
            place = place or job.join()
            result = training_job.run(job, place, folder)
            told |= {"stop": result["stop"]} if "stop" in result else {}
            place.close()  # a rank that failed does not: it would wait for the others
        except Exception:
            # into the log alone: the terminal gets one line
            os.write(2, traceback.format_exc().encode())
            raise
    return result


def _record(folder: Path) -> Record:
    return Record(folder, "train", "Does the model learn, and how fast?")


def _close(
    record: Record | None,
    folder: Path,
    ranks: int,
    codes: Mapping[int, int] | None = None,
    stopped: str = "",
) -> Ended:
    """Close the record from the ranks' states, and return the job's end."""
    failure = first_failure(folder, ranks, codes)
    if failure is not None and failure.how in ("interrupted", "terminated"):
        stopped = stopped or failure.how
    reason, message = "ok", ""
    if stopped:
        how = "interrupted (Ctrl-C)" if stopped == "interrupted" else "asked to end (SIGTERM)"
        reason, message, failure = stopped, f"the job was {how}", None
    elif failure is not None:
        reason = "rank_died" if failure.how == "killed" else "error"
        message = f"rank {failure.rank} failed first: " * (ranks > 1) + failure.message
    elif codes is not None:
        known = f": {dict(codes)}" if codes else ""
        reason, message = "error", f"no rank says why torchrun failed{known}; see torchrun.log"
    more: dict[str, Any] = {}
    if failure is not None:
        told = ("rank", "how", "message", "traceback")
        more["first_failure"] = {name: getattr(failure, name) for name in told}
    result = read_json(folder / "result.json", {}) if reason == "ok" else {}
    if result:
        more["result"] = result
    if stop := result.get("stop"):
        reason, message = stop["reason"], stop["message"]
    if record is not None:
        record.content.update(more)
        record.close(reason, message)
    elif (content := read_json(folder / "record.json", {})).get("status") == "running":
        # rank 0 had the record, and is gone
        more |= {"status": STATUS_OF[reason], "stop_reason": reason, "message": message}
        write_json(folder / "record.json", content | more | {"ended": environment.utc_now()})
    return Ended(folder, STATUS_OF[reason], message, failure, result)


if __name__ == "__main__":
    supervised_rank(Path(sys.argv[1]))
