"""Plans of tiny notebooks, and a place where their runs are made up."""

from sample_notebooks import RUN, write_notebook

from workbook.runs import opening, record
from workbook.runs.batch.job import ENDED
from workbook.runs.batch.plan import read_plan
from workbook.runs.batch.state import Batch
from workbook.runs.files import read_json, write_json

PLAN = """\
question: Does it run?
jobs:
  - name: first
    notebook: tiny
    file: two.yaml
    parameters: {rate: 2}
    grid: {precision: [fp32, bf16], deep: [false, true]}
  - {name: second, notebook: "01", parameters: {layers: 5}, repeats: 2, after: first, timeout: 2m}
"""
NAMES = [
    "first precision=fp32 deep=False",
    "first precision=fp32 deep=True",
    "first precision=bf16 deep=False",
    "first precision=bf16 deep=True",
    "second #1",
    "second #2",
]


def write_plan(folder, plan=PLAN, *cells):
    """A folder with notebooks/01_tiny.ipynb, plan.yaml and the parameters that it names."""
    verdict = "run.verdict('layers are few', 'PASS', {'layers': layers})"
    cells = cells or (verdict, "1 / (layers - 7)")
    write_notebook(folder / "notebooks" / "01_tiny.ipynb", RUN, *cells)
    (folder / "two.yaml").write_text("layers: 2\nrate: 1\n")
    (folder / "plan.yaml").write_text(plan)
    return folder / "plan.yaml"


def opened() -> Batch:
    """The batch of plan.yaml in this folder, as a driver that has just begun sees it."""
    return Batch(read_plan("plan.yaml"))


def statuses(batch: Batch) -> list[str]:
    return [job.status for job in batch.jobs]


class MadeUp:
    """Jobs end at the next look. `ends` says how, by name: a stop reason, or a list of one for each
    time, else "ok"; "dies" is a child that is gone, "stays" one that has to be cancelled.
    """

    every_s = 0.0

    def __init__(self, at_a_time=1, ends=None):
        self.at_a_time, self.ends, self.ran, self.most = at_a_time, ends or {}, [], 0
        self.left, self.message = {}, ""

    def check(self, jobs):
        pass

    def start(self, ready, running):
        started = ready[: self.at_a_time - len(running)]
        for job in started:
            self.ran.append(job.name)
            reason = self.ends.get(job.name, "ok")
            reason = reason.pop(0) if isinstance(reason, list) else reason
            content = read_json(job.folder / "job.json")
            assert job.look() not in ENDED, "a child would leave it as it is"
            run = opening.create_folder(content["options"]["root"], content["name"])
            status = record.STATUS_OF.get(reason, "running")
            kept = {"run_id": run.name, "status": status, "stop_reason": None, "seconds": 2.0}
            if status != "running":
                kept |= {"stop_reason": reason}
            if status == "failed" and self.message:
                kept["message"] = self.message
            write_json(run / "record.json", kept | {"started": "2026"})
            write_json(job.folder / "started.json", {"run": str(run), "status": status})
            self.left[job] = reason
        self.most = max(self.most, len(running) + len(started))
        return started

    def poll(self, running):
        gone = [job for job in running if self.left.get(job) != "stays"]
        return {job: "its node died" * (self.left.pop(job, "dies") == "dies") for job in gone}

    def cancel(self, running):
        for job in running:
            job.look()
            content = record.load(job.run) | {"status": "killed", "stop_reason": "terminated"}
            write_json(job.run / "record.json", content)
            self.left[job] = "terminated"
