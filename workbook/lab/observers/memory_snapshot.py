"""Memory of one step: allocations held at the peak, their owners, and the backward's changes."""

from __future__ import annotations

import csv
import json
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whyhung.watch.counting import in_place_of
from workbook.lab.measure.allocations import timeline
from workbook.lab.measure.attribution import Attributing, Attribution
from workbook.lab.measure.owners import Parts
from workbook.lab.measure.recorders import AGREEMENT, MOST_ENTRIES, cross_check
from workbook.lab.observers.memory_page import text, told
from workbook.lab.observers.trace import Ranges
from workbook.lab.oracles.steps import device_of

SECOND = "second"  # of a training's steps, the first that holds all that later ones do


def chosen(asked: str, steps: range, profiled: range, graph: bool) -> int | None:
    """Step number that `asked` names, a number or SECOND; None for "". Raises ValueError for a step
    that is not among `steps`, that is profiled, or that a CUDA graph replays."""
    if not asked:
        return None
    if graph:
        raise ValueError(
            "a CUDA graph replays a step without phases and allocates nothing in it: "
            "--memory-snapshot without --cuda-graph shows what the same step holds"
        )
    if asked == SECOND and steps:
        asked = str(steps[:2][-1])
    if not (asked.isascii() and asked.isdigit()) or int(asked) not in steps:
        raise ValueError(
            f"memory_snapshot={asked!r} is no step from {steps.start} to {steps.stop - 1}, counted "
            f"from 0; {SECOND!r} is the second, in which AdamW has its state"
        )
    if int(asked) in profiled:
        raise ValueError(
            f"step {asked} is profiled, and torch has one profiler: take a step outside of "
            f"{profiled.start}:{profiled.stop}"
        )
    return int(asked)


class MemorySnapshot:
    """Record step number `step`, counted from 0, to `folder`: memory-rankK.json with all data, .csv
    with the table of the peak's owners, .txt for readers; on a GPU also .pickle, which torch's
    memory_viz reads, and memory-summary-rankK.txt.

    Use it as an observer of a Trainer; or call begin(i) and end(i) around step i of any other loop,
    whose phases are detected from its calls of backward and optimizers. `close` reports a step that
    was never reached or never ended, and errors of this class, which do not end the training. Other
    steps cost nothing; this one takes about 60 us longer per torch call, and on a GPU it resets the
    peak of torch's statistics.
    """

    def __init__(
        self, step: int, folder: Path, rank: int = 0, *, model: nn.Module | None = None
    ) -> None:
        if step < 0:
            raise ValueError(f"memory_snapshot={step}: steps are counted from 0")
        self.step, self.folder, self.rank = step, folder, rank
        self.parts, self._model, self._compiled = Parts(model), model, False
        self.notes: list[str] = []
        self.done = self._closed = False
        self._recorder: Attributing | None = None
        self._on = ExitStack()
        self._last = -1  # step that ended
        self._borders: list[tuple[dict[str, int], str]] = []  # statistics, summary
        self._depth = 0
        from torch.optim.optimizer import register_optimizer_step_post_hook as behind
        from torch.optim.optimizer import register_optimizer_step_pre_hook as before

        self._hooks = ExitStack()
        self._hooks.enter_context(before(self._stepping))
        self._hooks.enter_context(behind(partial(self._entered, "after the optimizer")))

    def on_start(self, trainer: Any) -> None:
        self.parts.models, self._model = [trainer.model], trainer.model
        self.parts.optimizers, self._compiled = [trainer.optimizer], trainer.config.compile
        self._hooks.close()

    def on_phase(self, name: str, step: int) -> None:
        if name == "end":
            self._last = step
        if step == self.step and not self.done:
            if name == "data":
                self._safely(self._begin)
            if self._recorder is not None:
                self._safely(self._phase, name)
            if self._recorder is not None and name == "end":
                self._safely(self._finish)

    def begin(self, step: int) -> None:
        """Begin a step of a loop without a Trainer."""
        if step == self.step and not self.done:
            for owner, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"),
                                (torch.autograd, "grad")):  # fmt: skip
                self._on.callback(in_place_of(owner, name, self._backward))
            self._safely(self._begin)
            self._entered("forward")

    def end(self, step: int, loss: Any = None) -> None:
        """End a step of a loop without a Trainer."""
        self._last = step
        if step == self.step:
            self._end()

    def close(self) -> None:
        """Write the partial record of a failed step, or a note on a step that was never reached."""
        if self._closed:
            return
        self._closed = True
        self._hooks.close()
        if self._recorder is not None:
            self.notes.append(
                f"step {self.step} did not end: this is what was held until it failed, and the "
                "peak may have been still to come"
            )
            self._end()
        if not self.done and not self.notes:
            last = f"the last to end was {self._last}, and --memory-snapshot {self._last} would do"
            self.notes.append(
                f"step {self.step} was never reached, so no memory was recorded: "
                f"{last if self._last >= 0 else 'no step ended'}"
            )
        if not self.done:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file(".txt").write_text("".join(f"{note}\n" for note in self.notes))

    def _end(self) -> None:
        for do, *args in ((self._phase, "end"), (self._finish,)):
            if self._recorder is not None:
                self._safely(do, *args)

    def _file(self, suffix: str, stem: str = "memory") -> Path:
        return self.folder / f"{stem}-rank{self.rank}{suffix}"

    def _safely(self, do: Callable[..., Any], *args: Any) -> None:
        """Call `do`, and turn its errors into notes: they must not end the training."""
        try:
            do(*args)
        except Exception as error:
            self.notes.append(f"the memory snapshot failed: {type(error).__name__}: {error}")
            recorder, self._recorder = self._recorder, None
            with suppress(Exception):
                if recorder is not None:
                    recorder.__exit__()
            with suppress(Exception):
                self._on.close()
            print(f"nsa: {self.notes[-1]}", file=sys.stderr, flush=True)

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        if not any(optimizer is known for known in self.parts.optimizers):
            self.parts.optimizers.append(optimizer)
        self._entered("optimizer")

    def _entered(self, name: str, *_: Any) -> None:
        """Begin a detected phase, unless it is already the current one."""
        recorder = self._recorder
        if recorder is not None and recorder.phases[-1:] != [name]:
            self._safely(self._phase, name)

    def _backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            if self._depth or self._recorder is None:
                return plain(*args, **options)
            self._recorder.rename("after the backward", "forward")  # of the next micro-batch
            self._entered("backward")
            self._depth += 1
            try:
                return plain(*args, **options)
            finally:
                self._depth -= 1
                self._entered("after the backward")

        return watched

    def _begin(self) -> None:
        if torch.autograd._profiler_enabled():
            raise RuntimeError("a profiler of torch's is on, and there is one; try another step")
        device = device_of(self._model)
        if self._model is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        compiled = self._compiled or _something_was_compiled(self._model)
        if compiled:
            self.notes.append(
                "something was compiled: what runs in it has neither modules nor lines; a run "
                "without compiling has them"
            )
        if device.type == "cuda":
            self._history()
            torch.cuda.reset_peak_memory_stats(device)
        ranges = Ranges(self._model, lines=True)  # on a GPU, too: NVTX is for other tools
        if not compiled:
            ranges.attach()
        self._on.callback(ranges.close)
        self._ranges, self._device = ranges, device
        recorder = Attributing(device, self.parts, lines=not compiled)
        recorder.__enter__()
        self._recorder = recorder

    def _phase(self, name: str) -> None:
        if self._model is None:
            self.parts.models = list(self._ranges.roots)
        self._recorder.on_phase(name, self.step)
        on_gpu = self._device.type == "cuda"
        statistics = torch.cuda.memory_stats(self._device) if on_gpu else {}
        summary = torch.cuda.memory_summary(self._device) if on_gpu else ""
        self._borders.append((dict(statistics), summary))

    def _history(self, recorder: Attributing | None = None) -> None:
        """Start torch's memory history or, given a recorder, write it to torch's snapshot file and
        fill in the lines that the recorder lacks."""
        history = torch.cuda.memory._record_memory_history
        if torch.cuda.get_allocator_backend() != "native":
            if recorder is None:
                self.notes.append("this allocator keeps no history: torch has no snapshot file")
            return
        if recorder is None:
            history("all", context="all", stacks="python", max_entries=MOST_ENTRIES)
            self._on.callback(history, None)
            return
        found = torch.cuda.memory._snapshot()
        with self._file(".pickle").open("wb") as stream:
            pickle.dump(found, stream)
        traces = found["device_traces"]
        if max(map(len, traces), default=0) < MOST_ENTRIES:
            recorder.fill(traces[recorder.index] if recorder.index < len(traces) else [])
        else:
            self.notes.append(
                f"torch's history overflowed {MOST_ENTRIES:,} entries: its snapshot file lacks "
                "the step's beginning; the table and the picture do not"
            )

    def _finish(self) -> None:
        recorder, self._recorder = self._recorder, None
        recorder.__exit__()
        self.folder.mkdir(parents=True, exist_ok=True)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            self._safely(self._history, recorder)
        self._on.close()
        found = recorder.attribution()
        record = told(found) | {"step": self.step, "rank": self.rank, "torch": torch.__version__}
        record["device"] = torch.cuda.get_device_name(self._device) if on_gpu else "cpu"
        record["timeline"] = timeline(recorder.stream)
        self._compare(found, record)
        record["notes"] = self.notes
        self._file(".json").write_text(json.dumps(record))
        with self._file(".csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(record["table"][0]))
            writer.writeheader()
            writer.writerows(record["table"])
        self._file(".txt").write_text(f"{text(record)}\n")
        self.done = True

    def _compare(self, found: Attribution, record: dict[str, Any]) -> None:
        """Record torch's own statistics, if any, and a cross-check of the two peaks."""
        if found.around("backward") is None:
            self.notes.append(
                f"no backward was seen in step {self.step}: a CUDA graph replays without phases, "
                "and what it holds was allocated at its capture; a run without one has them"
            )
        if self._device.type != "cuda":
            check = found.lives
            lost = check.lost_bytes / max(1, found.peak)
            note = "" if lost <= AGREEMENT else f"frees of {lost:.1%} of the peak went unseen"
            record["cross_check"] = {"agrees": not note, "note": note}
            return
        peak = torch.cuda.max_memory_allocated(self._device)
        record["cross_check"] = cross_check(peak, found.peak)
        at = {"end_of_peak_phase": next(e for _, s, e in found.lives.spans if s <= found.at <= e)}
        if around := found.around("backward"):
            at |= {"before_backward": around[0], "after_backward": around[1]}
        marks = [event for event, _ in found.stream.marks]
        seen = dict(zip(marks, self._borders, strict=False))
        told = {name: seen.get(event, ({}, "")) for name, event in at.items()}
        record["torch_statistics"] = {name: statistics for name, (statistics, _) in told.items()}
        summaries = [f"{name.replace('_', ' ')}\n{summary}" for name, (_, summary) in told.items()]
        self._file(".txt", "memory-summary").write_text("\n".join(summaries))


def _something_was_compiled(model: nn.Module | None) -> bool:
    """True if this process has compiled code, or will when the model is called."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    waiting = (
        (hasattr(m, "_orig_mod") or m._compiled_call_impl for m in model.modules()) if model else ()
    )
    return bool(dynamo is not None and dynamo.counters["frames"]) or any(waiting)
