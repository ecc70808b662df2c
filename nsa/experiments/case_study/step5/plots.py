"""The figures of the step-5 question, in the looks of all others."""

from itertools import pairwise

import numpy as np

from nsa.experiments.case_study.figures import BAND_US, ESTIMATE_MIB, MEMORY_MIB, TIMINGS
from nsa.experiments.case_study.loop.design import production
from nsa.experiments.case_study.loop.saved import held
from nsa.experiments.case_study.step5 import decision
from nsa.experiments.case_study.step5.investigation import OBSERVERS, PRINTS, Results
from nsa.experiments.case_study.step5.trials import Trial
from nsa.workbook import looks

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#C00000", "#8a8a8a"
GIB = 2**30


def coordinate(trial: Trial) -> tuple[np.ndarray, np.ndarray]:
    """Seconds since the first step began, and P as steps done, the backward's nodes counted in."""
    began = trial.evidence.began_s or 0.0
    seen = [s for s in trial.evidence.of(0) if s.p.step >= 0]
    times = np.array([s.t - began for s in seen])
    steps = [s.p.step + _fraction(s.p) for s in seen]
    return times, np.maximum.accumulate(np.array(steps)) if steps else np.array([])


def _fraction(p) -> float:
    if p.phase == "backward" and p.total:
        return 0.5 + 0.45 * min(1.0, p.fired / p.total)
    return {"data": 0.0, "forward": 0.25, "backward": 0.5, "optimizer": 0.95, "end": 1.0}.get(
        p.phase, 0.0
    )


def console_beside_heartbeat(trial: Trial):
    """What the console showed and what the heartbeat showed, of one run, against time."""
    times, steps = coordinate(trial)
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.6)
        axes.plot(times, steps + 1, color=BLUE, label="heartbeat: P, from outside")
        shown = [_console(trial, p) for p in steps]
        axes.step(times, shown, where="post", color=ORANGE, lw=2.4, label="console: its last line")
        if trial.evidence.deadline_s and not trial.finished:
            axes.axvline(trial.evidence.deadline_s, color=RED, ls="--", lw=1.1, label="deadline")
        axes.set(xlabel="time since step 1 began (s)", ylabel="step it is in", ylim=(0, None))
        looks.title(axes, f"Said to hang at step {trial.said}; was in step {trial.reached}")
        looks.legend(fig, [axes])
    return fig


def _console(trial: Trial, steps: float) -> float:
    line = trial.schedule.last_line(int(steps) + 1, int(steps))
    return np.nan if line is None else line


def progress(results: Results, low: float = 0.7, high: float = 1.4):
    """P against time of the same run under each deadline, with the band predicted before."""
    chosen = {n: t for n, t in results.named.items() if n.endswith(" x") or n.endswith(" layers")}
    step_s = results.lab.step_s
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.8)
        longest = max((coordinate(t)[0].max(initial=0.1) for t in chosen.values()), default=1.0)
        line = np.array([0.0, longest])
        axes.fill_between(line, line / (high * step_s), line / (low * step_s), color=GREY,
                          alpha=0.18, lw=0, label="predicted, 1 layer")  # fmt: skip
        colours = (RED, ORANGE, GREEN, BLUE, GREY)
        # One run under several deadlines is one curve: the shorter ones lie on wider lines.
        for number, ((name, trial), colour) in enumerate(
            zip(chosen.items(), colours, strict=False)
        ):
            times, steps = coordinate(trial)
            of = f"deadline {name}" if name.endswith(" x") else name
            end = "ended (dot)" if trial.finished else "cut (cross)"
            axes.plot(times, steps, color=colour, lw=max(1.4, 6 - 1.6 * number), zorder=2.5,
                      solid_capstyle="butt", label=f"{of}: {end}")  # fmt: skip
            if len(times):
                mark = "o" if trial.finished else "X"
                axes.plot(times[-1:], steps[-1:], mark, color=colour, ms=9, mec="white", zorder=3)
            if name.endswith(" x"):
                axes.axvline(trial.evidence.deadline_s, color=colour, ls=":", lw=1.0)
        most = max((t.steps for t in chosen.values()), default=1)
        axes.set(xlabel="time since step 1 began (s)", ylabel="steps done", ylim=(0, 1.1 * most),
                 xlim=(0, 1.05 * longest))  # fmt: skip
        looks.title(axes, "A longer deadline cuts a later step, until the run ends")
        looks.legend(fig, [axes])
    return fig


def said_and_reached(results: Results):
    """Where each run was, and where its console put it, one pair a trial."""
    layers = [n for n in results.named if n.endswith(" layers")]
    names = [n for n in ("1 x", *PRINTS, *OBSERVERS, *layers) if n in results.named]
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.42 * len(names) + 0.6)
        for level, name in enumerate(names):
            trial = results.named[name]
            said = trial.said if trial.said is not None else 0
            axes.plot([said, trial.reached], [level, level], color=GREY, lw=1.0)
            axes.plot(trial.reached, level, "o", color=BLUE, ms=8,
                      label="the step it was in" if not level else None)  # fmt: skip
            axes.plot(said, level, "|", color=ORANGE, ms=16, mew=3,
                      label="the last line: 'hangs at'" if not level else None)  # fmt: skip
        axes.set_yticks(range(len(names)), ["as it was" if n == "1 x" else n for n in names])
        axes.set(xlabel="step, all under one deadline", xlim=(-0.3, None),
                 ylim=(len(names) - 0.5, -0.5))  # fmt: skip
        looks.title(axes, "What is printed decides where a run is said to hang")
        axes.grid(False, axis="y")
        looks.legend(fig, [axes])
    return fig


def microseconds(results: Results):
    """Seconds of a step against its operations: the case study's nine, and the exhibit here."""
    with looks.style():
        fig, (axes, each) = looks.panels(2, 3.8)
        count = np.array([t.operations for t in TIMINGS])
        seconds = np.array([t.seconds for t in TIMINGS])
        ends = np.array([count.min() / 60, count.max() * 1.6])
        low, high = BAND_US
        axes.fill_between(ends, ends * low / 1e6, ends * high / 1e6, color=GREY, alpha=0.3, lw=0,
                          label=f"{low:g} to {high:g} µs an operation")  # fmt: skip
        for gpu, colour, marker in (("A100", BLUE, "o"), ("RTX 3090", ORANGE, "s")):
            chosen = np.array([t.gpu == gpu for t in TIMINGS])
            axes.plot(count[chosen], seconds[chosen], marker, color=colour, ms=7,
                      label=f"case study, {gpu}")  # fmt: skip
        for row in results.operations[:1]:
            axes.plot(row["operations"], row["seconds"], "*", color=GREEN, ms=12, mec="black",
                      mew=0.5, label="the rebuilt loop, here")  # fmt: skip
        axes.set(
            xscale="log", yscale="log", xlabel="operations of a step", ylabel="time of a step (s)"
        )
        axes.grid(False, which="minor")
        axes.yaxis.set_major_formatter("{x:g}")
        looks.title(axes, "Seconds follow from operations")
        each.axvspan(low, high, color=GREY, alpha=0.3, lw=0)
        levels = range(len(TIMINGS))
        for level, t in enumerate(TIMINGS):
            colour, marker = (BLUE, "o") if t.gpu == "A100" else (ORANGE, "s")
            each.plot(t.microseconds, level, marker, color=colour, ms=7)
        each.set_yticks(levels, [f"{t.layers} × T {t.tokens}: {t.seconds:g} s" for t in TIMINGS])
        each.invert_yaxis()
        each.set(xlabel="time an operation (µs)", ylabel="layers × T: time of a step", xlim=(0, 16))
        apart = seconds.max() / seconds.min()
        looks.title(each, f"One constant, though seconds differ {apart:.0f}-fold")
        looks.legend(fig, [axes])
    return fig


def memory_table(layers: int = 5):
    """Its table as dots, and what the copies add up to as bars."""
    tokens = list(MEMORY_MIB)
    found = [held(production(layers), t) for t in tokens]
    parts = {
        "window's copies": [f.window for f in found],
        "selected copies": [f.selected for f in found],
        "compressed copies": [f.compressed for f in found],
        "all else": [f.total - f.window - f.selected - f.compressed for f in found],
    }
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.6)
        below = np.zeros(len(tokens))
        for (name, sizes), colour in zip(parts.items(), (BLUE, GREEN, "#56B4E9", GREY),
                                         strict=True):  # fmt: skip
            values = np.array(sizes) / GIB
            axes.bar(range(len(tokens)), values, 0.6, bottom=below, color=colour, label=name)
            below += values
        reported = [MEMORY_MIB[t] / 1024 for t in tokens]
        axes.plot(range(len(tokens)), reported, "X", color=RED, ms=9, mec="white",
                  label="reported")  # fmt: skip
        for at, (sum_, said) in enumerate(zip(below, reported, strict=True)):
            axes.annotate(f"{sum_:.2f} | {said:.2f}", (at, max(sum_, said)), (-9 if at else 0, 8),
                          textcoords="offset points", fontsize=8,
                          ha="right" if at else "center")  # fmt: skip
        estimate = [ESTIMATE_MIB[t] / 1024 for t in tokens]
        axes.plot(range(len(tokens)), estimate, "--", color="black", lw=1.1,
                  label="its estimator")  # fmt: skip
        axes.set_xticks(range(len(tokens)), [f"T {t}" for t in tokens])
        axes.set(xlabel="tokens of the sequence", ylabel="peak memory of a step (GiB)")
        looks.title(axes, f"{layers} layers: copies add up to the table", "predicted | reported")
        looks.legend(fig, [axes])
    return fig


PLACES = {
    "ended": (0, 3), "PASS": (0, 1.5), "moves": (1, 3), "proof": (1, 1.5), "HANG": (0.6, 0),
    "further": (2, 3), "RERUN": (1.7, 0), "state": (3, 3), "LEAK": (3, 1.5),
    "operations": (4, 3), "ELSEWHERE": (3.2, 0), "DISPATCH": (4.1, 1.5),
}  # fmt: skip


def decision_tree(results: Results):
    """The tree with the branch that the evidence takes."""
    path = decision.decide(results)
    taken = [node for node, _ in path]
    pairs = set(pairwise(taken))
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.8)
        fig.set_figwidth(10.5)
        axes.set_axis_off()
        looks.title(axes, "Hung or slow? The branch that the evidence takes is red")
        axes.set(xlim=(-0.45, 4.55), ylim=(-0.5, 3.5))
        boxes = {node: _box(axes, node, node in taken) for node in PLACES}
        for node, question in decision.TREE.items():
            for answer, target in (("yes", question.yes), ("no", question.no)):
                on = (node, target) in pairs
                a, b = PLACES[node], PLACES[target]
                axes.annotate("", b, a, arrowprops={
                    "arrowstyle": "-|>", "color": RED if on else "#a0a0a0", "lw": 2.4 if on else 1,
                    "patchA": boxes[node], "patchB": boxes[target], "shrinkA": 1,
                    "shrinkB": 1})  # fmt: skip
                axes.text(0.5 * (a[0] + b[0]), 0.5 * (a[1] + b[1]), answer, ha="center",
                          va="center", fontsize=8.5, color=RED if on else "#606060",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2})  # fmt: skip
    return fig


def _box(axes, node: str, on: bool):
    asked = node in decision.TREE
    text = decision.TREE[node].text if asked else _wrapped(node)
    drawn = axes.text(*PLACES[node], text, ha="center", va="center", fontsize=8.5, bbox={
        "boxstyle": "round,pad=0.4" if asked else "square,pad=0.4",
        "facecolor": "#fde9d0" if on else "white", "edgecolor": RED if on else "#a0a0a0",
        "lw": 2.0 if on else 1.0})  # fmt: skip
    return drawn.get_bbox_patch()


def _wrapped(leaf: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(decision.LEAVES[leaf], 19))
