"""Profile a few steps with torch's profiler: a trace with named ranges, and tables of times."""

import csv
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from workbook.lab.measure import kernels
from workbook.lab.measure.allocators import CALLED, ROOT
from workbook.lab.measure.lines import calling
from workbook.lab.measure.recorders import profiled
from workbook.lab.measure.timing import wait
from workbook.lab.observers.phases import BETWEEN, PhaseTimes

PHASES = ("data", "forward", "backward", "optimizer", "graph")
STEP = "step "  # name of the range around a step, followed by its number
SHOWN = 10  # rows of a table that are printed


class Ranges:
    """Observer that opens named ranges for torch's profiler or NSight: each step, its phases, and
    inside them every call of a module, under the module's name. On a GPU they are NVTX ranges as
    well.

    Compiled models and CUDA graphs run no module hooks: there only phases have ranges. Cost: 12 us
    of host time for each module and step.

    model None: ranges of all modules that are called; `roots` are the outermost ones. lines: a
    module's range includes the line that called it, for workbook.lab.measure.attribution.
    """

    def __init__(
        self, model: nn.Module | None, device: str | torch.device = "cpu", *, lines: bool = False
    ) -> None:
        self._lines = lines
        self._model, self._on_gpu = model, torch.device(device).type == "cuda"
        self.roots: list[nn.Module] = [] if model is None else [model]
        self._names: dict[nn.Module, str] = {}
        self._open = threading.local()  # a recomputed block runs in autograd's own thread
        self.hooked, self._hooks = True, []  # hooked: True if modules have ranges

    def on_start(self, trainer: Any) -> None:
        config = getattr(trainer, "config", None)
        names = ("compile", "cuda_graph")
        self.hooked = not any(getattr(config, name, False) for name in names)

    def on_phase(self, name: str, step: int) -> None:
        self._close()  # the previous phase, or a range that an exception left open
        if name == "end":
            self._close()
            return
        if name == "data":
            self._close(all_of_them=True)
            self._enter(f"{STEP}{step}")
            if self.hooked and not self._hooks:
                self.attach()
        self._enter(name)

    def close(self) -> None:
        """End every range of this thread, and remove the hooks."""
        self._close(all_of_them=True)
        while self._hooks:
            self._hooks.pop().remove()

    def attach(self) -> None:
        """Open ranges for modules, until `close`."""
        if self._model is None:
            modules, enter = nn.modules.module, self._before_any
            self._hooks = [
                modules.register_module_forward_pre_hook(enter),
                modules.register_module_forward_hook(self._after, always_call=True),
            ]
            return
        for name, module in self._model.named_modules():
            enter, leave = partial(self._before, name or ROOT), self._after
            self._hooks.append(module.register_forward_pre_hook(enter))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        self._enter(f"{name}{CALLED}{calling(sys._getframe(1))}" if self._lines else name)

    def _before_any(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            self.roots.append(module)
            self._names |= {inner: name or ROOT for name, inner in module.named_modules()}
        self._before(self._names[module], module, args)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._close()

    def _enter(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._stack().append(opened)
        if self._on_gpu:
            torch.cuda.nvtx.range_push(name)

    def _close(self, all_of_them: bool = False) -> None:
        stack = self._stack()
        while stack:
            if self._on_gpu:
                torch.cuda.nvtx.range_pop()
            stack.pop().__exit__(None, None, None)
            if not all_of_them:
                return

    def _stack(self) -> list[record_function]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        return self._open.stack


class StepTrace:
    """Observer that profiles `steps`, costs nothing in others, and writes a Chrome trace (`file`,
    .json.gz) that Perfetto opens; then `report` returns its tables.

    Observed steps are slower: a microsecond or two for each operator, and the first needs a second
    or more to start the profiler. Waits for the device before the first and after the last.
    """

    def __init__(
        self, model: nn.Module, device: str | torch.device, steps: range, file: Path
    ) -> None:
        if not steps:
            raise ValueError(f"{steps} holds no step to profile")
        self.device, self.steps, self.file = torch.device(device), steps, file
        self._ranges = Ranges(model, device)
        self._times = PhaseTimes(device)
        self._profile: ExitStack | None = ExitStack()
        self._seen: Any = None  # torch's profile, once started
        self._trainer: Any = None
        self.done = False

    def on_start(self, trainer: Any) -> None:
        self._trainer = trainer
        self._ranges.on_start(trainer)

    def on_phase(self, name: str, step: int) -> None:
        if self._seen is None and name == "data" and step == self.steps.start:
            wait(self.device)
            activities = kernels.activities_of(self.device)
            self._seen = self._profile.enter_context(profiled(activities, profile_memory=True))
        if self._seen is None or self.done:
            return
        self._times.on_phase(name, step)
        self._ranges.on_phase(name, step)
        if name == "end" and step == self.steps.stop - 1:
            self.done = True
            self.close()

    def close(self) -> None:
        """End the profile, also one that a failed step cut short, and write its trace."""
        if self._seen is None or self._profile is None:
            return
        self._ranges.close()
        if self.done:  # after an exception the device may never be done
            wait(self.device)
        self._profile.close()
        self._profile = None
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._seen.export_chrome_trace(str(self.file))

    def report(self) -> "Report":
        """Tables of the profile. Raises ValueError if not all of the steps were taken."""
        if not self.done:
            raise ValueError(f"steps {self.steps.start} to {self.steps.stop} were not all taken")
        tree = self._seen.profiler.kineto_results.experimental_event_tree()
        host_ms: dict[str, float] = defaultdict(float)
        for step in tree:
            if step.name.startswith(STEP):
                host_ms["step"] += step.duration_time_ns / 1e6
                for phase in step.children:
                    host_ms[phase.name] += phase.duration_time_ns / 1e6
        on_gpu, device_ms = self.device.type == "cuda", defaultdict(float)
        spans, work = kernels.measured(self._seen, on_gpu)
        if on_gpu:
            whole = kernels.gaps([span for times in work.values() for span in times])
            device_ms["step"] = whole["step_ms"]
            for row in self._times.steps():
                device_ms[row["phase"]] += row["ms"]
        names = (*PHASES, BETWEEN, "step")
        phases = [
            {"phase": name, "host_ms": host_ms.get(name), "device_ms": device_ms.get(name)}
            for name in names
            if name in host_ms or name in device_ms
        ]
        steps = len(self.steps)
        for row, column in itertools.product(phases, ("host_ms", "device_ms")):
            row[column] = None if row[column] is None else row[column] / steps
        return Report(self.steps, on_gpu, phases, kernels.top(spans, count=50), self._notes())

    def _notes(self) -> list[str]:
        config = getattr(self._trainer, "config", None)
        if getattr(config, "cuda_graph", False):
            return [
                "a CUDA graph replays forward, backward and optimizer as one phase, and allocates "
                "nothing: what it holds was allocated when it was captured"
            ]
        if getattr(config, "compile", False):
            return ["compiled blocks run no hooks: the trace has ranges of the phases alone"]
        return []


@dataclass(frozen=True)
class Report:
    """Tables of a profile, each a list of rows: `phases`, {phase, host_ms, device_ms} per step, the
    step itself last; `kernels`, see `kernels.top`."""

    steps: range
    on_gpu: bool
    phases: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    notes: list[str]

    @property
    def accounted(self) -> float:
        """Ratio of the phases' sum to the step, in device time on a GPU, else in host time."""
        column = "device_ms" if self.on_gpu else "host_ms"
        *phases, step = (row[column] or 0.0 for row in self.phases)
        return sum(phases) / step

    def write(self, folder: Path) -> None:
        """Write profile-phases.csv and -kernels.csv, if they have rows, and profile.txt, which is
        str(report)."""
        for name in ("phases", "kernels"):
            if rows := getattr(self, name):
                with (folder / f"profile-{name}.csv").open("w", newline="") as stream:
                    writer = csv.DictWriter(stream, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)
        (folder / "profile.txt").write_text(f"{self}\n")

    def __str__(self) -> str:
        clock = "device" if self.on_gpu else "host"
        lines = [
            f"steps {self.steps.start + 1} to {self.steps.stop}, ms a step; the phases sum to "
            f"{self.accounted:.1%} of it ({clock}'s time)",
            *columns(self.phases, {"host_ms": ".3f", "device_ms": ".3f"}),
            "",
            "kernels by time" if self.on_gpu else "operators by their own time, all steps together",
            *columns(self.kernels[:SHOWN], {"ms": ".3f", "share": ".1%"}),
        ]
        return "\n".join([*lines, *self.notes])


def columns(
    rows: list[dict[str, Any]], formats: dict[str, str], left: Collection[str] = ()
) -> list[str]:
    """Format the rows as text, a heading first; columns of None alone are left out. left: names of
    left-aligned columns."""
    names = [n for n in (rows[0] if rows else ()) if any(row[n] is not None for row in rows)]

    def text(name: str, value: Any) -> str:
        return "" if value is None else format(value, formats.get(name, ""))

    cells = [names, *([text(name, row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.ljust if name in left else str.rjust for name in names]
    return [
        "  " + "  ".join(to(c, w) for to, c, w in zip(sides, line, widths, strict=True)).rstrip()
        for line in cells
    ]
