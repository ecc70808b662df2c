"""The figures of the settlement: three tables re-read, and the verdicts at a glance."""

from collections.abc import Mapping, Sequence

import numpy as np

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.case_study.figures import BAND_US, TIMINGS
from nsa.experiments.case_study.loop.design import production
from nsa.experiments.case_study.loop.saved import held, with_correct_window
from nsa.experiments.case_study.settlement.claims import CONTRADICTED, Settled
from nsa.experiments.case_study.settlement.facts import deadline_s
from nsa.experiments.case_study.settlement.trials import Ended
from nsa.workbook import looks

MIB, GIB = 2**20, 2**30
COLOURS = {
    "REFUTED": "#D55E00",
    "CONFIRMED": "#009E73",
    "EXPLAINED": "#0072B2",
    "VOID": "#9E4F86",
    "INCONCLUSIVE": "#6E6E6E",
    CONTRADICTED: "#000000",
}
ARMS = {"plain": ("#0072B2", "-"), "aux stats": ("#E69F00", "--"), "traced": ("#D55E00", "-")}


def memory():
    """The reported peaks, the copies that make them, its estimator, and a right window's peaks."""
    tokens = np.array(sorted(case_study.MEMORY_MIB))
    fine = np.unique(np.geomspace(tokens[0], 2 * tokens[-1], 25).astype(int))
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.9)
        copies = [held(production(5), int(t)).total / GIB for t in fine]
        right = [held(with_correct_window(production(5)), int(t)).total / GIB for t in fine]
        axes.plot(fine, copies, "--", color="#0072B2", label="predicted: one copy a token")
        axes.plot(fine, right, ":", color="#009E73", label="with a window that sees its w keys")
        axes.plot(fine, case_study.estimate_mib(fine) / 1024, color="#777777", ls="-.", lw=1.1,
                  label="its estimator, a + b T²")  # fmt: skip
        reported = [case_study.MEMORY_MIB[int(t)] / 1024 for t in tokens]
        axes.plot(tokens, reported, "o", color="#D55E00", ms=7, label="reported, 5 layers")
        axes.set(xscale="log", yscale="log", xlabel="T (tokens)", ylabel="peak memory (GiB)")
        looks.plain_ticks(axes, [*tokens, 4096])
        axes.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(False, which="minor")
        looks.title(axes, "A step's peak: copies explain it, T² does not", "fp32, batch 1")
        looks.legend(fig, [axes])
    return fig


def microseconds():
    """Seconds of nine reported steps against their operations; a line is one time an operation."""
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.6)
        operations = np.array([t.operations for t in TIMINGS])
        ends = np.array([operations.min() / 1.6, operations.max() * 1.6])
        low, high = (ends * us / 1e6 for us in BAND_US)
        band = f"{BAND_US[0]} to {BAND_US[1]} µs an operation"
        axes.fill_between(ends, low, high, alpha=0.18, color="#0072B2", lw=0, label=band)
        for gpu, marker, colour in (("A100", "o", "#0072B2"), ("RTX 3090", "s", "#D55E00")):
            mine = [t for t in TIMINGS if t.gpu == gpu]
            axes.plot([t.operations for t in mine], [t.seconds for t in mine], marker, ms=7,
                      color=colour, label=gpu)  # fmt: skip
        for limit, name in ((30, "30 s limit"), (60, "60 s limit"), (180, "watchdog, 180 s")):
            axes.axhline(limit, color="#777777", lw=0.8, ls="--")
            axes.annotate(name, (ends[0], limit), va="bottom", fontsize=7.5, color="#555555")
        axes.set(
            xscale="log", yscale="log", xlabel="operations of a step", ylabel="time of a step (s)"
        )
        axes.set_yticks([1, 10, 100], ["1", "10", "100"])
        axes.grid(False, which="minor")
        looks.title(axes, "Nine reported steps cost one time an operation")
        looks.legend(fig, [axes])
    return fig


def cut(trials: Mapping[str, Ended]):
    """The step that has begun against the clock, three arms; where a deadline would cut each."""
    ended = trials.get("deadlines")
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.2)
        if ended is None or ended.found is None:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "the trial `deadlines` did not run to its end", ha="center")
            return fig
        begun = ended.found["begun_s"]
        at = deadline_s(begun)
        for arm, times in begun.items():
            colour, line = ARMS[arm]
            axes.step(times, np.arange(1, len(times) + 1), line, where="post", color=colour,
                      label=arm)  # fmt: skip
        for times, name in (
            (0.5, "half the\ndeadline"),
            (1.0, "a\ndeadline"),
            (2.0, "twice the\ndeadline"),
        ):
            axes.axvline(at * times, color="#777777", lw=0.9, ls="--")
            axes.annotate(name, (at * times, 1.01), xycoords=axes.get_xaxis_transform(),
                          fontsize=8, va="bottom", ha="center", color="#555555")  # fmt: skip
        axes.set(xlabel="time since the first of ten steps began (s)", ylabel="step that has begun",
                 xscale="log", xlim=(at / 12, None), yticks=range(1, 11))  # fmt: skip
        axes.set_title("The step that a deadline cuts moves with the deadline\n", loc="left",
                       fontsize=10, pad=16)  # fmt: skip
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(False, which="minor")
        looks.legend(fig, [axes])
    return fig


def verdicts(settled: Sequence[Settled]):
    """A box a row, in the colour of its verdict."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    with looks.style():
        fig, axes = plt.subplots(figsize=(9.5, 2.9))
        columns = 14
        groups = [[s for s in settled if s.row.id.startswith(kind)] for kind in "CH"]
        at = 0
        for group in groups:
            for number, one in enumerate(group):
                x, y = number % columns, at + number // columns
                axes.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, lw=0,
                                         facecolor=COLOURS[one.verdict]))  # fmt: skip
                axes.text(x + 0.5, y + 0.5, one.row.id, ha="center", va="center", color="white",
                          fontsize=9, weight="bold")  # fmt: skip
            at += -(-len(group) // columns) + 0.35
        axes.set(xlim=(0, columns), ylim=(at - 0.3, 0))
        axes.set_axis_off()
        looks.title(axes, "C: contradictions between the reports; H: causes that were proposed")
        used = dict.fromkeys(one.verdict for one in settled)
        counts = {v: sum(one.verdict == v for one in settled) for v in used}
        handles = [Patch(color=COLOURS[v], label=f"{v} ({counts[v]})") for v in used]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8.5)
    return fig
