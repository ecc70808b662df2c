"""One step's memory, told: what is held at the peak, by whom, and what the backward changes."""

from __future__ import annotations

import csv
import json
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa.lab.measure.attribution import BEFORE, ENOUGH, Attributing, Attribution, Parts
from nsa.lab.measure.allocations import CATEGORIES, timeline
from nsa.lab.measure.recorders import AGREEMENT, MIB, cross_check
from nsa.lab.observers.trace import Ranges, columns
from nsa.lab.oracles.steps import device_of
from nsa.lab.watch.counting import in_place_of

SHOWN, LEAST = 15, 0.001  # rows of the table that are printed, at most, and their least share
MOST_ENTRIES = 2_000_000  # of torch's own history


class MemorySnapshot:
    """Records step number `step`, counted from 0, and leaves it in `folder`: memory-rankK.json with
    everything, .csv with the table of who holds the peak, .txt for a reader; on a GPU also .pickle,
    which torch's memory_viz reads, and memory-summary-rankK.txt.

    An observer of a Trainer; or by hand, begin(i) and end(i) around whatever a stranger's step i
    does, whose phases are found where this process calls a backward or an optimizer. `close` tells
    of a step that was never reached or never ended. What goes wrong here is told there too, and
    ends no training. Other steps cost nothing; this one takes 10 us an operator longer, and on a
    GPU it resets the peak of torch's statistics.
    """

    def __init__(
        self, step: int, folder: Path, rank: int = 0, *, model: nn.Module | None = None,
        max_entries: int = MOST_ENTRIES,
    ) -> None:  # fmt: skip
        if step < 0:
            raise ValueError(f"memory_snapshot={step}: steps are counted from 0")
        self.step, self.folder, self.rank, self.max_entries = step, folder, rank, max_entries
        self.parts, self._model, self._compiled = Parts(model), model, False
        self.notes: list[str] = []
        self.done = self._closed = False
        self._recorder: Attributing | None = None
        self._on = ExitStack()
        self._seen = -1  # the last step that began
        self._borders: list[tuple[int, dict[str, int], str]] = []  # event, statistics, summary
        self._depth = 0
        from torch.optim.optimizer import register_optimizer_step_pre_hook as before
        from torch.optim.optimizer import register_optimizer_step_post_hook as behind

        self._hooks = [
            before(self._stepping),
            behind(partial(self._entered, "after the optimizer")),
        ]

    def on_start(self, trainer: Any) -> None:
        self.parts.models, self._model = [trainer.model], trainer.model
        self.parts.optimizers, self._compiled = [trainer.optimizer], trainer.config.compile
        self._unhook()

    def on_phase(self, name: str, step: int) -> None:
        if name == "data":
            self._seen = step
        if step == self.step and not self.done:
            if name == "data":
                self._safely(self._begin)
            if self._recorder is not None:
                self._safely(self._phase, name)
            if name == "end":
                self._safely(self._finish)

    def begin(self, step: int) -> None:
        """Before a stranger's step."""
        self._seen = step
        if step == self.step and not self.done:
            for owner, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"),
                                (torch.autograd, "grad")):  # fmt: skip
                self._on.callback(in_place_of(owner, name, self._backward))
            self._safely(self._begin)
            self._entered("forward")

    def end(self, step: int) -> None:
        """After it."""
        if self._recorder is not None and step == self.step:
            self._safely(self._phase, "end")
            self._safely(self._finish)

    def close(self) -> None:
        """Writes what there is of a step that failed, and says so of one that never came."""
        if self._closed:
            return
        self._closed = True
        self._unhook()
        if self._recorder is not None:
            self.notes.append(
                f"step {self.step} did not end: this is what was held until it failed, and the "
                "peak may have been still to come"
            )
            self._safely(self._phase, "end")
            self._safely(self._finish)
        if not self.done and not self.notes:
            self.notes.append(
                f"step {self.step} was never reached, so no memory was recorded: "
                + (f"the last step was {self._seen}; --memory-snapshot {self._seen} would do"
                   if self._seen >= 0 else "no step began")
            )  # fmt: skip
        if not self.done:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file(".txt").write_text("".join(f"{note}\n" for note in self.notes))

    def _file(self, suffix: str, stem: str = "memory") -> Path:
        return self.folder / f"{stem}-rank{self.rank}{suffix}"

    def _safely(self, do: Callable[..., Any], *args: Any) -> None:
        """A training does not end for its snapshot's sake."""
        try:
            do(*args)
        except Exception as error:
            self.notes.append(f"the memory snapshot failed: {type(error).__name__}: {error}")
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                recorder.__exit__()
            self._on.close()
            print(f"nsa: {self.notes[-1]}", file=sys.stderr, flush=True)

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        if not any(optimizer is known for known in self.parts.optimizers):
            self.parts.optimizers.append(optimizer)
        self._entered("optimizer")

    def _entered(self, name: str, *_: Any) -> None:
        """A stranger's phase begins, unless it is under way."""
        recorder = self._recorder
        if recorder is not None and (not self._borders or recorder.stream.marks[-1][1] != name):
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
        device = device_of(self._model)
        if self._model is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        compiled = self._compiled or _something_was_compiled()
        if compiled:
            self.notes.append(
                "something was compiled: what runs in it has neither modules nor lines; a run "
                "without compiling has them"
            )
        if device.type == "cuda":
            self._history(True)
            torch.cuda.reset_peak_memory_stats(device)
        ranges = Ranges(self._model)  # on a GPU, too: NVTX is for others
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
        self._borders.append((len(self._recorder.stream), dict(statistics), summary))

    def _history(self, on: bool) -> None:
        if torch.cuda.get_allocator_backend() != "native":
            self.notes.append("the allocator keeps no history: torch has no snapshot file of it")
        elif on:
            torch.cuda.memory._record_memory_history(
                "all", context="all", stacks="python", max_entries=self.max_entries
            )
            self._on.callback(torch.cuda.memory._record_memory_history, None)
        else:
            found = torch.cuda.memory._snapshot()
            with self._file(".pickle").open("wb") as stream:
                pickle.dump(found, stream)
            longest = max(map(len, found["device_traces"]), default=0)
            if longest >= self.max_entries:
                self.notes.append(
                    f"torch's history overflowed {self.max_entries:,} entries: its snapshot file "
                    "lacks the step's beginning; the table and the picture do not"
                )

    def _finish(self) -> None:
        recorder, self._recorder = self._recorder, None
        recorder.__exit__()
        self.folder.mkdir(parents=True, exist_ok=True)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            self._safely(self._history, False)
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
        """torch's own statistics where it has any; and whether both have the same peak."""
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
        record["cross_check"] = cross_check(
            torch.cuda.max_memory_allocated(self._device), found.peak
        )
        ends = {event: (statistics, summary) for event, statistics, summary in self._borders}
        spans = [(name, start, end) for name, start, end in found.lives.spans]
        ours = {"before_backward": "backward", "after_backward": "backward"}
        texts = []
        record["torch_statistics"] = {}
        peak_end = next(end for _, start, end in spans if start <= found.at <= end)
        places = {"end_of_peak_phase": peak_end}
        if around := found.around(ours["before_backward"]):
            places |= {"before_backward": around[0], "after_backward": around[1]}
        for name, event in places.items():
            statistics, summary = ends.get(event, ({}, ""))
            record["torch_statistics"][name] = statistics
            texts.append(f"{name.replace('_', ' ')}\n{summary}")
        self._file(".txt", "memory-summary").write_text("\n".join(texts))


def _something_was_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo is not None and dynamo.counters["frames"])


def told(found: Attribution) -> dict[str, Any]:
    """The plain values of an attribution, in MiB: the peak and its phase, what the backward
    changes by category, statistics by torch's names, and the table with the share that it tells."""
    rows = found.rows()
    named = [row for row in rows if is_told(row)]
    lives, at = found.lives, {"peak": found.at}
    if around := found.around("backward"):
        at |= {"before_backward": around[0], "after_backward": around[1]}
    held = {
        name: {category: size / MIB for category, size in lives.held(event).items()}
        for name, event in at.items()
    }
    if around:
        before, after = held["before_backward"], held["after_backward"]
        held["difference"] = {name: after[name] - before[name] for name in CATEGORIES}
    return {
        "peak_mib": found.peak / MIB,
        "phase": found.phase,
        "held_mib": held,
        "statistics": {name: found.statistics(event) for name, event in at.items()},
        "explained": sum(row["mib"] for row in named) * MIB / found.peak,
        "missing": [
            {"why": _why(row), "mib": row["mib"], "share": row["share"]}
            for row in rows
            if not is_told(row)
        ],
        "table": rows,
    }


def is_told(row: dict[str, Any]) -> bool:
    """Whether the row says which line allocated it, or whose of the model it is."""
    return bool(row["line"] or (row["phase"] == BEFORE and row["module"]))


def _why(row: dict[str, Any]) -> str:
    if row["phase"] == BEFORE:
        return "there before the step, in no tensor that a name of Python's leads to"
    by = f"by {row['operator']}" if row["operator"] else "by nothing that torch's profiler names"
    return f"allocated in the {row['phase']} {by}, with no line of Python's around it"


def text(record: dict[str, Any]) -> str:
    """The record as a page."""
    held, peak = record["held_mib"], record["peak_mib"]
    size = partial(_size, unit="GiB" if peak >= 2048 else "MiB")
    lines = [
        f"memory of step {record['step']} (counted from 0) on {record['device']}, rank "
        f"{record['rank']}: {size(peak)} at the peak, in the {record['phase']}"
    ]
    if record["device"] == "cpu":
        lines.append(
            "counted from the allocator's events: torch has no statistics, summary or snapshot "
            "file of a CPU"
        )
    names = [name for name in CATEGORIES if any(held[at].get(name) for at in held)]
    columns_ = ["before_backward", "after_backward", "difference", "peak"]
    table = [
        {"category": name.replace("_", " ")}
        | {
            at.replace("_", " "): size(held[at][name], at == "difference")
            for at in columns_
            if at in held
        }
        for name in names
    ]
    table.append(
        {"category": "all"}
        | {at.replace("_", " "): size(sum(held[at].values()), at == "difference")
           for at in columns_ if at in held}
    )  # fmt: skip
    lines += ["", *columns(table, {}, left=("category",))]
    share, aim = record["explained"], f"{ENOUGH:.0%}"
    lines += ["", f"{share:.1%} of the peak is told by module and line (aim: {aim})"]
    shown = [
        {"held": size(row["mib"]), "share": f"{row['share']:.1%}", "category": row["category"]}
        | {"allocated in": row["phase"], "module": row["module"] or "-"}
        | {"line": row["line"] or (row["operator"] and f"[{row['operator']}]") or "-"}
        for row in record["table"][:SHOWN]
        if row["share"] >= LEAST
    ]
    lines += columns(shown, {}, left=("category", "allocated in", "module", "line"))
    if more := len(record["table"]) - len(shown):
        rest = sum(row["mib"] for row in record["table"][len(shown) :])
        lines.append(f"  and {more} more rows with {size(rest)}")
    if share < ENOUGH:
        lines += ["", "what is missing:"]
        lines += [f"  {size(row['mib'])} {row['why']}" for row in record["missing"][:SHOWN]]
    if (note := record.get("cross_check", {}).get("note")) or record["notes"]:
        lines += ["", *filter(None, [note, *record["notes"]])]
    return "\n".join(lines)


def _size(mib: float, signed: bool = False, unit: str = "MiB") -> str:
    value = mib / 1024 if unit == "GiB" else mib
    return f"{value:{'+' if signed else ''}.2f} {unit}"
