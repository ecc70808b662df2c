"""Time and memory against T, and the break-even with dense attention, from recorded runs alone."""

from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from nsa.config import NSAConfig
from nsa.experiments.explore.plots import BEGIN, figure
from nsa.workbook import looks, metrics, store
from nsa.workbook.scaling import crossing

NSA, DENSE, TRAINING = "nsa_attention", "dense_attention", "training_step"
LIMITS = {"limit": "#000000", "dense limit": "#9a9a9a"}  # what the hardware allows, nobody runs
# What is shown: (operations, metric, mode) of the rows.
QUANTITIES = {
    "attention forward (ms)": ((NSA, DENSE), "latency", "forward"),
    "attention backward (ms)": ((NSA, DENSE), "latency", "backward"),
    "attention forward and backward (ms)": ((NSA, DENSE), "latency", "step"),
    "attention memory beyond inputs and outputs (MiB)": ((NSA, DENSE), "peak_memory", "backward"),
    "training step memory (MiB)": ((TRAINING,), "peak_memory", "step"),
    "training step time (ms)": ((TRAINING,), "step_time", "step"),
}
SIZES = [f.name for f in fields(NSAConfig)]


@dataclass(frozen=True)
class Recorded:
    """Rows of all runs over T: quantity, setup, backend, dense, tokens, value, outcome, run; of a
    point that was measured several times the newest run's."""

    rows: object

    def quantities(self) -> list[str]:
        return [name for name in QUANTITIES if (self.rows["quantity"] == name).any()]

    def setups(self, quantity: str) -> list[str]:
        """What was measured, the setup with the most T first."""
        rows = self.rows[(self.rows["quantity"] == quantity) & self.rows["value"].notna()]
        if not len(rows):
            return []
        rows = rows[~rows["backend"].isin(LIMITS)]
        lengths = rows.groupby("setup")["tokens"].nunique()
        points = rows.groupby("setup")["tokens"].count()
        return sorted(lengths.index, key=lambda name: (-lengths[name], -points[name], name))

    def of(self, quantity: str, setup: str):
        rows = self.rows
        return rows[(rows["quantity"] == quantity) & (rows["setup"] == setup)]


def recorded(root: str | Path) -> Recorded:
    """Everything below `root`. ValueError where no run there has a row of it."""
    import pandas

    parts = []
    opened = store.open_store(root)
    for folder in opened.folders():
        df = metrics.read(folder / "metrics.csv")
        df = df[df["x_name"] == "tokens"]
        for name, (operations, metric, mode) in QUANTITIES.items():
            rows = df[
                df["operation"].isin(operations) & (df["metric"] == metric) & (df["mode"] == mode)
            ]
            configs = metrics.configs(rows)
            # of an A/B or a planted fault a row does not tell the whole setup
            whole = ["preset" in c or {"heads", "kv_heads", "dim"} <= c.keys() for c in configs]
            rows = rows[np.array(whole, bool)]
            configs = metrics.configs(rows)
            found = {
                "quantity": name,
                "setup": [_setup(c, d) for c, d in zip(configs, rows["device"], strict=True)],
                "backend": rows["backend"],
                "dense": rows["operation"] == DENSE,
                "tokens": rows["x_value"].astype(int),
                "value": rows["median"],
                "outcome": [c.get("outcome", "ok") for c in configs],
                "run": folder.name,
            }
            parts += [pandas.DataFrame(found)] if len(rows) else []
    if not parts:
        raise ValueError(
            f"no run below {root} has times or memory over T; `nsa run backend_comparison` and "
            "`nsa run memory_scaling` measure them"
        )
    rows = pandas.concat(parts, ignore_index=True)
    # a run that could not measure a point takes nothing from an older one that did
    rows = rows.sort_values("value", na_position="first", key=lambda v: v.notna(), kind="stable")
    rows = rows.drop_duplicates(["quantity", "setup", "backend", "tokens"], keep="last")
    return Recorded(rows.sort_values("tokens", kind="stable").reset_index(drop=True))


def _setup(config: dict, device: str) -> str:
    """All that must be equal for two points to lie on one curve, in words."""
    model = metrics.model_name(config)
    parts = [device, model] if model else [device]
    if not model:
        parts += [f"HQ {config.get('heads')}", f"HKV {config.get('kv_heads')}"]
        parts += [f"D {config.get('dim')}", f"{config.get('queries', 'random')} queries"]
        parts += ["own k, v a branch"] * (config.get("shared_kv") is False)
        parts += [
            f"{name} {config[name]}" for name in SIZES
            if config.get(name, getattr(NSAConfig, name)) != getattr(NSAConfig, name)
        ]  # fmt: skip
    parts += [str(config[name]) for name in ("dtype",) if config.get(name)]
    batch, recomputed = config.get("batch", 1), config.get("checkpoint")
    parts += [f"batch {batch}"] * (batch != 1) + [f"checkpoint {recomputed}"] * bool(recomputed)
    return ", ".join(parts)


def against_tokens(found: Recorded, quantity: str, setup: str, tokens: int):
    """Every backend's curve, dense attention dotted, limits dashed, a failure as a cross at the
    top, T marked."""
    rows = found.of(quantity, setup)
    with _axes(quantity, setup) as (fig, axes):
        for backend, line in looks.backends(rows):
            good = line[line["value"] > 0]
            if not len(good):
                continue
            colour, marker = looks.look(backend)
            style = ":" if good["dense"].all() else "-"
            if backend in LIMITS:
                colour, marker, style = LIMITS[backend], "", "--"
            axes.plot(
                good["tokens"], good["value"], style, color=colour, marker=marker, label=backend
            )
        _over_tokens(axes, rows, tokens)
        looks.log_axis(axes.yaxis)
        axes.set_ylabel(_unit(quantity))
        failed = rows[rows["value"].isna() & ~rows["outcome"].isin(("not run", "ok"))]
        ran = set(rows[rows["value"].notna()]["backend"]) - {*LIMITS}
        failing = [
            (name, line["tokens"], line["outcome"])
            for name, line in looks.backends(failed)
            if name in ran
        ]
        if failing:
            low, high = axes.get_ylim()
            axes.set_ylim(low, high * (high / low) ** (0.08 + 0.07 * len(failing)))
            looks.crosses(axes, failing, rows["tokens"])
        _legend(fig, axes)
    return fig


def against_dense(found: Recorded, quantity: str, setup: str, tokens: int):
    """How many times as long as each implementation of NSA the fastest dense one takes."""
    table = _beside_dense(found.of(quantity, setup))
    with _axes(f"Break-even with dense attention: {quantity}", setup) as (fig, axes):
        for backend, line in table.items():
            colour, marker = looks.look(backend)
            axes.plot(line.index, line, color=colour, marker=marker, label=backend)
        axes.axhline(1, color=looks.GREY, lw=1, ls="--")
        if len(table):
            _over_tokens(axes, table.reset_index(), tokens)
            looks.log_axis(axes.yaxis)
            axes.set_ylabel("dense / NSA; above 1 NSA wins")
        else:
            axes.set(xticks=[], yticks=[])
            why = "no dense attention was measured beside it"
            axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center")
        _legend(fig, axes)
    return fig


def sentences(found: Recorded, quantity: str, setup: str, tokens: int) -> list[str]:
    """The answer at T: which NSA takes least, what dense takes, from where NSA wins, and which runs
    say so. Between measured T it names the next longer one."""
    rows = found.of(quantity, setup)
    good = rows[(rows["value"] > 0) & ~rows["backend"].isin(LIMITS)]
    if not len(good):
        return [f"{quantity}: nothing was measured of {setup}"]
    ours, dense = good[~good["dense"]], good[good["dense"]]
    there = sorted(set(ours["tokens"]))
    at = next((t for t in there if t >= tokens), None)
    if at is None:
        told = [f"T = {tokens} is beyond {there[-1]}, the longest T that was measured"]
        at = there[-1]
    else:
        told = [] if at == tokens else [f"T = {tokens} was not measured; the next longer T is {at}"]
    unit = _unit(quantity)
    here = ours[ours["tokens"] == at].sort_values("value")
    least, others = here.iloc[0], here.iloc[1:]
    text = f"at T = {at} {least['backend']} takes least: {_said(least['value'])} {unit}"
    text += "".join(f"; {r['backend']} {_said(r['value'])}" for _, r in others.iterrows())
    told.append(text)
    beside = dense[dense["tokens"] == at].sort_values("value")
    if len(beside):
        one = beside.iloc[0]
        times = one["value"] / least["value"]
        told.append(
            f"dense attention ({one['backend']}) takes {_said(one['value'])} {unit} there, "
            f"{times:.2g} times as much"
        )
    told += _break_even(_beside_dense(rows))
    told.append(f"each point is its newest run's, of {', '.join(sorted(set(good['run'])))}")
    return told


def _unit(quantity: str) -> str:
    """Of "attention forward (ms)"."""
    return quantity[quantity.rindex("(") + 1 : -1]


def _said(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _break_even(table) -> list[str]:
    """From which T each column is above 1, in words; those that never are in one sentence."""
    told, never = [], {}
    for backend, line in table.items():
        line = line.dropna()
        where = crossing(list(line.index), [1.0] * len(line), list(line))
        if where.startswith("beyond"):
            never.setdefault(line.index[-1], []).append(backend)
        elif where.startswith("below"):
            told.append(f"{backend} takes less than dense at every T measured, {line.index[0]} on")
        else:
            told.append(f"{backend} takes less than dense from T = {where} on")
    told += [
        f"up to T = {t}, their longest, these never do: {', '.join(b)}" for t, b in never.items()
    ]
    return told


def _beside_dense(rows):
    """One column an NSA backend, one line a T: the fastest dense by it."""
    good = rows[(rows["value"] > 0) & ~rows["backend"].isin(LIMITS)]
    dense = good[good["dense"]].groupby("tokens")["value"].min()
    ours = good[~good["dense"]]
    table = ours.pivot_table(index="tokens", columns="backend", values="value", sort=False)
    return table.rdiv(dense, axis=0).dropna(how="all").dropna(how="all", axis=1)


@contextmanager
def _axes(title: str, note: str):
    """A figure and its axes, with room for a legend at the right."""
    with figure(4.4) as fig:
        axes = fig.subplots()
        fig.subplots_adjust(left=BEGIN, right=0.82, top=0.88, bottom=0.12)
        fig.text(BEGIN, 0.955, title, fontsize=10)
        fig.text(BEGIN, 0.91, note, fontsize=8, color=looks.GREY)
        yield fig, axes


def _over_tokens(axes, rows, tokens: int) -> None:
    axes.set_xscale("log", base=2)
    there = sorted(set(rows["tokens"]))
    axes.set_xlim(there[0] / 1.2, there[-1] * 1.2)
    looks.plain_ticks(axes, there)
    axes.axvline(np.clip(tokens, there[0] / 1.2, there[-1] * 1.2), color="black", lw=1)
    axes.set_xlabel("T (tokens)")


def _legend(fig, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        fig.legend(handles, labels, loc="center left", bbox_to_anchor=(0.83, 0.5), fontsize=8.5)
