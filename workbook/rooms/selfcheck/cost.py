"""Cost of counting in a training, and how early its counters predict the end of a backward.

Both are measured in a child process on the training step of this package.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from whyhung.process.trial import Outcome, run_child
from whyhung.verdict.pace import backward_eta_s
from whyhung.watch import Progress, Unheard, read
from whyhung.watch.evidence import Sample

EVERY_S = 0.02  # between two samples of a backward
DEADLINE_S = 120.0


def cost_of_counting(settings: dict[str, Any], *, steps: int = 4, rounds: int = 4) -> Outcome:
    """Run `counting` in a separate process and return its outcome."""
    spec = {"settings": settings, "steps": steps, "rounds": rounds}
    return run_child(f"{__name__}:counting", spec, deadline_s=DEADLINE_S)


def end_of_a_backward(settings: dict[str, Any], *, steps: int = 3) -> Outcome:
    """Run `estimated_end` in a separate process and return its outcome."""
    spec = {"settings": settings, "steps": steps}
    return run_child(f"{__name__}:estimated_end", spec, deadline_s=DEADLINE_S)


def counting(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure {"ratio", "counted_ms", "plain_ms", "clock"} of a step counted as in a trial, or not.

    spec: "settings" of workbook.lab.search.training_subject, "steps" per turn, "rounds"; see
    workbook.lab.measure.timing.
    """
    from workbook.lab.measure.timing import interleaved
    from workbook.lab.search.training_subject import make

    with tempfile.TemporaryDirectory() as folder:
        unheard = Progress(Path(folder, "unheard.bin"))
        unheard.close()
        subject = make(spec["settings"], Unheard(unheard))
        trainer = subject.trainer

        @contextlib.contextmanager
        def counted() -> Iterator[None]:
            progress = Progress(Path(folder, f"progress-{trainer.steps_done}.bin"))
            progress.attach()
            trainer.observers = (progress,)
            try:
                yield
            finally:
                trainer.observers = ()
                progress.close()

        trainer.observers = ()
        found = interleaved(trainer, counted, rounds=spec["rounds"], steps=spec["steps"])
        subject.close()
    times = {"plain_ms": found.plain_ms, "counted_ms": found.watched_ms, "clock": found.clock}
    return {"ratio": found.ratio, **times}


def estimated_end(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure {"worst", "left_at_half", "seconds", "looks", "nodes"}, errors of a backward's ETA.

    spec: "settings" of workbook.lab.search.training_subject, "steps", of which the longest backward
    sampled in its second half counts; ValueError if there is none. worst: the largest error of
    `backward_eta_s` once half of the nodes have run, as a fraction of the backward's `seconds`;
    left_at_half: the error at the first such sample, as a fraction of the time left. looks: the
    number of samples after the half.
    """
    from workbook.lab.search.training_subject import make

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "progress.bin")
        progress = Progress(file)
        progress.attach()
        subject = make(spec["settings"], progress)
        samples: list[Sample] = []
        over = threading.Event()

        def look() -> None:
            done = False
            while not done:
                done = over.wait(EVERY_S)  # one more sample after the last step: it ended
                samples.append(Sample(time.perf_counter(), 0, read(file)[0]))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        for i in range(spec["steps"]):
            subject.step(i)
        over.set()
        thread.join()
        subject.close()
    found = [one for step in range(spec["steps"]) if (one := errors_of(samples, step))]
    if not found:
        raise ValueError(
            f"no look into the second half of any of {spec['steps']} backwards, with one every "
            f"{EVERY_S * 1000:.0f} ms: they are too short; more layers or tokens make them longer"
        )
    return max(found, key=lambda one: one["seconds"])


def errors_of(samples: list[Sample], step: int) -> dict[str, Any] | None:
    """Compute `estimated_end` for one step's backward, from samples of the counters.

    None if no sample with an estimate fell into its second half.
    """
    began = next((n for n, s in enumerate(samples) if s.p.step == step and s.p.fired), len(samples))
    mine = list(takewhile(lambda s: s.p.step == step and s.p.fired < s.p.total, samples[began:]))
    after = samples[began + len(mine) : began + len(mine) + 1]  # first sample that found it done
    if not after:
        return None
    later = [n for n, s in enumerate(mine) if s.p.fired >= s.p.total / 2]
    told = [(backward_eta_s(mine[: n + 1]), after[0].t - mine[n].t) for n in later]
    errors = [(abs(eta - left), left) for eta, left in told if eta is not None]
    if not errors:
        return None
    seconds = after[0].t - mine[0].t
    return {
        "worst": max(off for off, _ in errors) / seconds,
        "left_at_half": errors[0][0] / errors[0][1],
        "seconds": seconds,
        "looks": len(errors),
        "nodes": mine[-1].p.total,
    }
