"""Run one notebook into a dated folder that records truthfully how it ends."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbook.lab.sweep import RUN_ENDS
from workbook.runs import environment, identity, keep, parameters, report, store
from workbook.runs.claim import VERDICTS
from workbook.runs.files import write_notebook
from workbook.runs.opening import Planned, open_folder
from workbook.runs.record import load
from workbook.runs.signals import Terminated, termination_is_an_exception

CUT = ("interrupted", "terminated")  # from outside, and to be run again


class Notebook:
    """A notebook with its declared parameters and the hash of its source, read once for many runs.

    `check` raises ValueError for values that are not consistent, which may take long to find out.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, identity.source(path)
        self.declared, self.check = parameters.declared(path), parameters.check_together(path)

    def planned(
        self,
        given: dict[str, Any],
        facts: dict[str, Any] | None = None,
        is_checked: Callable[[dict[str, Any]], bool] = lambda full: True,
    ) -> Planned:
        """Plan a run in the environment `facts`, or this one. ValueError for a wrong parameter,
        and for those that `is_checked` lets `check` see."""
        given = parameters.check(self.declared, given)
        full = parameters.filled(self.declared, given)
        if is_checked(full):
            self.check(full)
        facts = facts or environment.snapshot(full.get("seed"))
        name = f"{self.path.stem}-{identity.run_id(self.path, full, facts, self.source)}"
        return Planned(self.path, given, full, facts, name, self.source)


@dataclass(frozen=True)
class RunResult:
    """Result of a run. `status`: ok, failed, timeout, killed or interrupted; `message`: why."""

    folder: Path
    status: str
    stop_reason: str
    seconds: float
    cached: bool = False
    verdicts: list[dict] = field(default_factory=list)
    report: Path | None = None
    message: str = ""

    @property
    def good(self) -> bool:
        """True if it ran to its end, and no verdict is FAIL."""
        return self.status == "ok" and store.overall(self.verdicts) != "FAIL"


def run_notebook(
    name_or_path: str | Path,
    given: dict[str, Any] | None = None,
    *,
    root: str | Path = "runs",
    timeout_s: float | None = None,
    cell_timeout_s: float | None = None,
    again: bool = False,
    evidence: bool = False,
    progress: bool = True,
    notebooks: str | Path = "notebooks",
    pages: bool = True,
    checked: bool = False,
    began: Callable[[Path], None] = lambda folder: None,
    say: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Execute a notebook with `given` parameters into a new folder below `root`.

    A run of the same id that reached its end is returned instead, whatever its verdicts, unless
    `again`. The figures of a run that reached its end are copied to figures/ beside `root`. With
    `evidence`, `environment.check_evidence` has to pass, and the trials that the run names are
    kept. Wrong names, parameters, deadlines and an unwritable `root` raise ValueError before
    anything starts; later failures are the result. The notebook measures only what `timeout_s`
    leaves time for. `began` is called with the new folder before anything runs in it; without
    `pages` the report and the page of all runs are left out. `checked`: the values are known to be
    consistent.
    """
    import papermill  # noqa: F401  where it is missing, nothing is to be written

    root = Path(root)
    for what, limit_s in (("timeout", timeout_s), ("cell timeout", cell_timeout_s)):
        if limit_s is not None and not limit_s > 0:
            raise ValueError(f"the {what} must be more than 0 s, got {limit_s}")
    read = Notebook(identity.find_notebook(name_or_path, notebooks))
    planned = read.planned(given or {}, is_checked=lambda full: not checked)
    notebook, name = planned.notebook, planned.name
    if evidence:
        environment.check_evidence(notebook)
    if not again and (finished := finished_runs(root, name, evidence)):
        earlier = finished[-1]
        say(f"this run exists: {earlier} (run it again with --again)")
        return _result(earlier, cached=True)
    if planned.full.get("device") == "cuda":
        store.find_machine("cuda")
    folder, record = open_folder(root, planned, evidence=evidence)
    began(folder)
    say(f"running {notebook.stem} into {folder}")
    stop_reason, message = "error", ""
    try:
        with termination_is_an_exception():
            stop_reason, message = _execute(planned, folder, timeout_s, cell_timeout_s, progress)
    except Terminated:
        stop_reason, message = "terminated", "the runner was asked to end (SIGTERM)"
    except KeyboardInterrupt:
        stop_reason, message = "interrupted", "the run was interrupted (Ctrl-C)"
    except Exception as error:  # a run that cannot even start is recorded like any other
        message = f"{type(error).__name__}: {error}"
    finally:
        content = record.close(stop_reason, message)
    if evidence:
        say("\n".join(keep.trials(folder)))
    # Failures to copy figures or to draw the report are printed, and have no other effect.
    if content["status"] == "ok":
        figures = root.parent / "figures"
        try:
            report.publish_figures(folder, root, figures)
        except OSError as error:
            say(f"no figures in {figures}: {error.strerror}")
    try:
        if pages:
            report.render(folder)
            report.index(root)
    except Exception as error:
        say(f"no report: {type(error).__name__}: {error}")
    return _result(folder)


def finished_runs(root: str | Path, name: str, evidence: bool = False) -> list[Path]:
    """Runs of this id that reached their end, oldest first, also those named `<name>-2` and so on;
    with `evidence` only those made as evidence."""
    patterns = (f"*/{name}/record.json", f"*/{name}-*/record.json")
    found = [path.parent for pattern in patterns for path in Path(root).glob(pattern)]
    found = [folder for folder in found if is_finished(load(folder), evidence)]
    return sorted(found, key=lambda folder: str(load(folder).get("started")))


def is_finished(record: dict, evidence: bool = False) -> bool:
    """True for the record of a run that reached its end, and is evidence if that is required."""
    return record.get("status") == "ok" and bool(record.get("evidence") or not evidence)


def _result(folder: Path, cached: bool = False) -> RunResult:
    record, page = load(folder), folder / "report.html"
    ended = [record[key] for key in ("status", "stop_reason", "seconds")]
    verdicts, shown = store.Run(folder).verdicts(), page if page.is_file() else None
    return RunResult(folder, *ended, cached, verdicts, shown, record.get("message", ""))


def _execute(planned: Planned, folder, timeout_s, cell_timeout_s, progress) -> tuple[str, str]:
    """Run papermill with our engine; returns the stop reason and the failure in one line."""
    import nbformat
    import papermill
    from papermill.exceptions import PapermillExecutionError

    from workbook.runs import engine

    variables = os.environ | {"NSA_HEADLESS": "1", "NSA_RUN": str(folder.resolve())}
    if timeout_s is not None:
        variables[RUN_ENDS] = str(time.monotonic() + timeout_s)
    notebook, output = planned.notebook, folder / "notebook.ipynb"
    message, shown = "", Shown(notebook.stem) if progress else None
    with contextlib.ExitStack() as files:
        files.enter_context(contextlib.closing(shown) if shown else contextlib.nullcontext())
        stdout, stderr, kernel = (
            files.enter_context((folder / f"{key}.log").open("w", encoding="utf-8"))
            for key in ("stdout", "stderr", "kernel")
        )
        try:
            papermill.execute_notebook(
                str(notebook),
                str(output),
                planned.given,
                engine_name=engine.register(),
                kernel_name="python3",
                language="python",
                progress_bar=False,
                stdout_file=stdout,
                stderr_file=stderr,
                kernel_log=kernel,
                kernel_cwd=str(notebook.resolve().parent),
                environment=variables,
                on_output=shown,
                timeout_s=timeout_s,
                cell_timeout_s=cell_timeout_s,
            )
        except PapermillExecutionError as error:
            message = f"{error.ename}: {error.evalue}"
    executed = nbformat.read(output, as_version=4)
    details = executed.metadata.papermill
    # paths of the files depend on this machine
    details.update(input_path=notebook.name, output_path=output.name)
    write_notebook(output, executed)
    stop_reason = details["stop_reason"]
    if stop_reason in ("timeout", "kernel_died", "terminated", "interrupted"):
        outputs = [o for cell in executed.cells for o in cell.get("outputs", [])]
        errors = [o.evalue for o in outputs if o.output_type == "error"]
        message = errors[-1] if errors else message
    return stop_reason, message


VERDICT = re.compile(rf"^(?:{'|'.join(VERDICTS)}): .*\n?", re.MULTILINE)


STEP = re.compile(r"^\[(\d+)/(\d+)\] ", re.MULTILINE)


class Shown:
    """A bar that counts what a notebook measures, by lines as "[3/15] ..." of its progress, since
    cells of a notebook take from no time to all of it. Called with each output, it prints it above
    the bar; not verdicts, which are printed at the end."""

    def __init__(self, name: str):
        from tqdm import tqdm

        # without a first measurement nobody knows how long it takes
        form = "{desc}: {n_fmt} of {total_fmt} measured |{bar}| {elapsed}, {remaining} left"
        self.bar = tqdm(file=sys.stderr, desc=name, bar_format=form, dynamic_ncols=True)
        self.before = self.done = self.of = 0  # measured by earlier cells, and by this one

    def __call__(self, output) -> None:
        if output.output_type != "stream":
            return
        text = "".join(output.text)
        self.bar.write(VERDICT.sub("", text), file=sys.stderr, end="")
        for done, of in STEP.findall(text):
            self.count(int(done), int(of))

    def count(self, done: int, of: int) -> None:
        """Move the bar; a smaller number than before, or of others, begins the next cell's."""
        if of != self.of or done < self.done:
            self.before, self.of = self.before + self.of, of
        self.done = done
        self.bar.total, self.bar.n = self.before + of, self.before + done
        self.bar.refresh()

    def close(self) -> None:
        self.bar.close()
