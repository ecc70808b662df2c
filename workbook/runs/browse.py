"""Panel to browse the numbers of stored runs: curves by quantity, run and setup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from textwrap import fill
from typing import TYPE_CHECKING, Any

from workbook.runs import environment, looks, metrics
from workbook.runs.live import Panel

if TYPE_CHECKING:
    from workbook.runs.loaded import StoredRun

EVERY = "every setup"
DASHES = ("-", "--", ":", "-.")
MOST_CURVES = 40
NAMED = 22  # most lines of the legend


def nothing(text: str) -> Panel:
    """Panel that only says `text`: a folder without runs is a beginning, not a mistake."""
    views = {"no runs": lambda: looks.nothing(text)}
    return Panel({}, views, lambda: [text], lambda start: {})


def _reach(run: StoredRun) -> int:
    """Number of x values that the run measured; 0 for a damaged one."""
    try:
        return run.stored_metrics["x_value"].nunique()
    except ValueError:
        return 0


def panel(library: Mapping[str, Sequence[StoredRun]], given: bool, quantity: str) -> Panel:
    """Panel of the runs of each notebook: at first all of them if `given`, else the newest with
    curves, with this quantity if they have it."""

    by_id = {run.id: run for runs in library.values() for run in runs}

    @lru_cache(8)
    def frame(ids: tuple[str, ...]):
        import pandas

        tables = [by_id[id].stored_metrics.assign(run=id) for id in ids]
        table = metrics.with_settings(pandas.concat(tables, ignore_index=True))
        names = [n for n in table if n not in (*metrics.COLUMNS, "run", "quantity")]
        return table.assign(
            quantity=[_quantity(r) for r in table[[*metrics.CURVE, "unit"]].to_dict("records")],
            setup=[_words(r) for r in table[names].to_dict("records")],
        )

    def quantities(ids: Sequence[str]) -> list[str]:
        table = frame(tuple(ids))
        table = table[table["median"].notna()]
        groups = table.groupby("quantity", sort=False)
        lengths, points = groups["x_value"].nunique(), groups.size()
        return sorted(points.index, key=lambda name: (-lengths[name], -points[name]))

    def setups(ids: Sequence[str], quantity: str) -> list[str]:
        table = frame(tuple(ids))
        there = list(dict.fromkeys(table[table["quantity"] == quantity]["setup"]))
        return [EVERY, *there] if len(there) > 1 else [EVERY]

    def chosen(runs: Sequence[str], quantity: str, setup: str):
        table = frame(tuple(runs))
        table = table[table["quantity"] == quantity]
        return table if setup == EVERY else table[table["setup"] == setup]

    def curves(notebook: str, runs: Sequence[str], quantity: str, setup: str):
        if not runs:
            raise ValueError("choose a run; with Ctrl or Shift several")
        return overlay(chosen(runs, quantity, setup), quantity)

    def told(notebook: str, runs: Sequence[str], quantity: str, setup: str) -> list[str]:
        return [*map(_about, (by_id[id] for id in runs)), *unlike([by_id[id] for id in runs])]

    def controls(start: Mapping[str, Any]) -> dict[str, Any]:
        import ipywidgets as widgets

        wide = {"layout": {"width": "440px"}, "style": {"description_width": "70px"}}
        ids = [run.id for run in library[start["notebook"]]]
        return {
            "notebook": widgets.Dropdown(
                options=list(library), value=start["notebook"], description="notebook", **wide
            ),
            "quantity": widgets.Dropdown(
                options=quantities(start["runs"]), value=start["quantity"],
                description="what", **wide,
            ),
            "runs": widgets.SelectMultiple(
                options=ids, value=start["runs"], description="runs", rows=min(5, len(ids)), **wide
            ),
            "setup": widgets.Dropdown(
                options=setups(start["runs"], start["quantity"]), value=start["setup"],
                description="setup", **wide,
            ),
        }  # fmt: skip

    def adjust(controls: Mapping[str, Any], name: str, value: Any) -> None:
        if name == "notebook":
            ids = [run.id for run in library[value]]
            controls["runs"].options, controls["runs"].value = ids, ids[:1]
        ids = controls["runs"].value
        if ids and name in ("notebook", "runs"):
            _offer(controls["quantity"], quantities(ids))
        if ids and name != "setup":
            _offer(controls["setup"], setups(ids, controls["quantity"].value))

    # by default the newest run with curves rather than points
    newest = sorted(by_id.values(), key=_started, reverse=True)
    first = next((run for run in newest if _reach(run) > 2), newest[0])
    notebook = next(name for name, runs in library.items() if first in runs)
    ids = tuple(run.id for run in library[notebook])
    ids = ids if given else (first.id,)
    there = quantities(ids)
    quantity = quantity if quantity in there else there[0]
    start = {"notebook": notebook, "runs": ids, "quantity": quantity, "setup": EVERY}
    return Panel(start, {"curves": curves}, told, controls, adjust)


def _started(run: StoredRun) -> str:
    return str(run.record.get("started"))


def _offer(control: Any, options: Sequence[str]) -> None:
    """Set the options of a control, keeping its value if it is among them."""
    before = control.value
    control.options = options
    control.value = before if before in options else options[0]


def overlay(rows, quantity: str):
    """Plot every curve of these rows, with its spread from q20 to q80 shaded: colours are backends
    if each has one curve a run, dashes are runs. Curves beyond MOST_CURVES are noted, not drawn."""
    from matplotlib.figure import Figure

    keys = [name for name in ("run", "backend", "setup") if rows[name].nunique() > 1]
    groups = list(rows.groupby(["run", "backend", "setup"], sort=False))
    runs = list(dict.fromkeys(rows["run"]))
    plain = all(
        part["setup"].nunique() == 1 for _, part in rows.groupby(["run", "backend"], sort=False)
    )
    with looks.style():
        fig = Figure(figsize=(9.6, 4.2), layout="none", dpi=100)
        axes = fig.subplots()
        fig.subplots_adjust(left=0.085, right=0.985 if len(groups) == 1 else 0.7, top=0.92,
                            bottom=0.13)  # fmt: skip
        lowest, highest, lines = float("inf"), 0.0, 0
        for number, ((run, backend, setup), line) in enumerate(groups[:MOST_CURVES]):
            if line["x_value"].isna().all():  # rows without x are placed side by side
                line = line.assign(x_value=range(len(line)))
            line = line.drop_duplicates("x_value", keep="last").sort_values("x_value")
            good = line[line["median"].notna()]
            if not len(good):
                continue
            names = {"run": run.rpartition("-")[2], "backend": backend, "setup": setup}
            label = fill(", ".join(names[key] for key in keys if names[key]), 44)
            colour, marker = looks.look(backend) if plain else looks.series(number)
            x = good["x_value"]
            style = DASHES[runs.index(run) % len(DASHES)]
            marker = marker if len(good) < 60 else ""
            lines += 1 + label.count("\n")
            look = {"color": colour, "marker": marker, "label": label if lines <= NAMED else None}
            axes.plot(x, good["median"], style, **look)
            axes.fill_between(x, good["q20"], good["q80"], color=colour, alpha=0.15, lw=0)
            lowest, highest = min(lowest, good["median"].min()), max(highest, good["median"].max())
        x = rows["x_value"].dropna()
        if len(x) and rows["x_name"].iloc[0] == "tokens" and x.min() > 0:
            axes.set_xscale("log", base=2)
            looks.plain_ticks(axes, x)
        elif len(x) and (x % 1 == 0).all():  # there is no step 2.5
            axes.xaxis.get_major_locator().set_params(integer=True)
        if 0 < lowest < highest / 20:
            looks.log_axis(axes.yaxis)
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
        axes.set(xlabel=rows["x_name"].iloc[0] or "row", ylabel=rows["unit"].iloc[0])
        more = f"{len(groups) - MOST_CURVES} more curves are not shown"
        looks.title(axes, quantity, more if len(groups) > MOST_CURVES else "")
        if len(groups) > 1:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig


def unlike(runs: Sequence[StoredRun]) -> list[str]:
    """Differences that prevent a like-for-like comparison of these runs: parameters, devices and
    versions, one sentence each."""
    if len(runs) < 2:
        return []
    facts: dict[str, list[str]] = {}
    for run in runs:
        known = environment.provenance(run.environment)
        known["device"] = run.device
        for name in ("device", "torch", "triton", "commit"):
            facts.setdefault(name, []).append(str(known.get(name) or "unknown"))
    names = sorted({name for run in runs for name in run.parameters})
    for name in names:
        values = [run.parameters.get(name, "not a parameter then") for run in runs]
        facts[f"parameter {name}"] = [
            json.dumps(v) if not isinstance(v, str) else v for v in values
        ]
    return [
        f"they differ in {name}: {', '.join(dict.fromkeys(values))}"
        for name, values in facts.items()
        if len(set(values)) > 1
    ]


def _about(run: StoredRun) -> str:
    facts = environment.provenance(run.environment)
    parts = [str(run.record.get("started"))[:10], run.device]
    parts += [f"torch {facts['torch']}", facts["commit"], run.status, run.verdict]
    return f"{run.id}: {', '.join(p for p in parts if p)}"


def _quantity(row: Mapping[str, Any]) -> str:
    over = f" over {row['x_name']}" if row["x_name"] else ""
    mode = f", {row['mode']}" if row["mode"] else ""
    unit = f" ({row['unit']})" if row["unit"] else ""
    return f"{row['operation']}{mode}: {row['metric']}{unit}{over}"


def _words(settings: Mapping[str, Any]) -> str:
    """ "heads 64, dtype bf16"."""
    told = [f"{n} {v}" for n, v in settings.items() if v is not None and v == v and v != ""]
    return ", ".join(told)
