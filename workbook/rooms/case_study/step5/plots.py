"""Figures of the step-5 question, in the project's common style."""

import numpy as np

from whyhung.verdict.pace import fraction
from workbook.rooms.case_study.step5.trials import OBSERVERS, PRINTS, Results, Trial
from workbook.runs import looks

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#C00000", "#8a8a8a"


def coordinate(trial: Trial) -> tuple[np.ndarray, np.ndarray]:
    """Seconds since the first step began, and P as steps done, counting the backward's nodes."""
    seen = [sample for sample in trial.evidence.of(0) if sample.p.step >= 0]
    times = np.array([sample.t for sample in seen]) - (trial.evidence.began_s or 0.0)
    steps = np.array([trial.steps * fraction(sample.p, trial.steps) for sample in seen])
    return times, np.maximum.accumulate(steps)


def console_beside_heartbeat(trial: Trial):
    """Plot the step of one run against time: by its console and by its heartbeat."""
    times, steps = coordinate(trial)
    with looks.figure(1, 3.6) as (fig, (axes,)):
        axes.plot(times, steps + 1, color=BLUE, label="heartbeat: P, from outside")
        lines = [trial.schedule.last_line(int(p) + 1, int(p)) for p in steps]
        shown = [np.nan if line is None else line for line in lines]
        axes.step(times, shown, where="post", color=ORANGE, lw=2.4, label="console: its last line")
        if trial.evidence.deadline_s and not trial.finished:
            axes.axvline(trial.evidence.deadline_s, color=RED, ls="--", lw=1.1, label="deadline")
        axes.set(xlabel="time since step 1 began (s)", ylabel="step it is in", ylim=(0, None))
        looks.title(axes, f"Said to hang at step {trial.said}; was in step {trial.reached}")
    return fig


def progress(results: Results):
    """Plot P against time of the same run under each deadline, with the band predicted before."""
    chosen = {n: t for n, t in results.named.items() if n.endswith((" x", " layers"))}
    step_s = results.lab.step_s
    with looks.figure(1, 3.8) as (fig, (axes,)):
        longest = max((coordinate(t)[0].max(initial=0.1) for t in chosen.values()), default=1.0)
        line = np.array([0.0, longest])
        band = line / (1.4 * step_s), line / (0.7 * step_s)
        axes.fill_between(line, *band, color=GREY, alpha=0.18, lw=0, label="predicted, 1 layer")
        # One run under several deadlines is one curve: the shorter ones have wider lines.
        curves = zip(chosen.items(), (RED, ORANGE, GREEN, BLUE, GREY), strict=False)
        for number, ((name, trial), colour) in enumerate(curves):
            times, steps = coordinate(trial)
            of = f"deadline {name}" if name.endswith(" x") else name
            label = f"{of}: {'ended (dot)' if trial.finished else 'cut (cross)'}"
            wide = {"lw": max(1.4, 6 - 1.6 * number), "zorder": 2.5, "solid_capstyle": "butt"}
            axes.plot(times, steps, color=colour, label=label, **wide)
            if len(times):
                mark = "o" if trial.finished else "X"
                axes.plot(times[-1:], steps[-1:], mark, color=colour, ms=9, mec="white", zorder=3)
            if name.endswith(" x"):
                axes.axvline(trial.evidence.deadline_s, color=colour, ls=":", lw=1.0)
        most = max((t.steps for t in chosen.values()), default=1)
        axes.set(xlabel="time since step 1 began (s)", ylabel="steps done")
        axes.set(xlim=(0, 1.05 * longest), ylim=(0, 1.1 * most))
        looks.title(axes, "A longer deadline cuts a later step, until the run ends")
    return fig


def said_and_reached(results: Results):
    """Plot the step each run had reached and the step its console reported, one pair a trial."""
    layers = [n for n in results.named if n.endswith(" layers")]
    names = [n for n in ("1 x", *PRINTS, *OBSERVERS, *layers) if n in results.named]
    reached = [results.named[name].reached for name in names]
    said = [results.named[name].said or 0 for name in names]
    levels = range(len(names))
    with looks.figure(1, 0.42 * len(names) + 0.6) as (fig, (axes,)):
        axes.hlines(levels, said, reached, color=GREY, lw=1.0)
        axes.plot(reached, levels, "o", color=BLUE, ms=8, label="the step it was in")
        axes.plot(said, levels, "|", color=ORANGE, ms=16, mew=3, label="the last line: 'hangs at'")
        axes.set_yticks(levels, ["as it was" if n == "1 x" else n for n in names])
        axes.set(xlabel="step, all under one deadline", xlim=(-0.3, None))
        axes.set(ylim=(len(names) - 0.5, -0.5))
        looks.title(axes, "What is printed decides where a run is said to hang")
        axes.grid(False, axis="y")
    return fig
