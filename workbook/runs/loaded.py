"""Stored runs in any notebook: numbers as DataFrames, figures, and curves to browse."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from textwrap import fill
from typing import Any

from workbook.runs import environment, looks, metrics, parameters, record, store
from workbook.runs.live import Panel

EVERY = "every setup"
DASHES = ("-", "--", ":", "-.")
MOST_CURVES = 40
NAMED = 22  # most lines of the legend


@dataclass(frozen=True)
class LoadedRun:
    """One run's folder. Each part is read on access, so a damaged file affects only its own part: a
    ValueError names the file and its fault."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @cached_property
    def record(self) -> dict[str, Any]:
        """Manifest: notebook, status, started, seconds and so on."""
        return self._json("record.json", {})

    @cached_property
    def status(self) -> str:
        """Status: ok, failed, timeout, killed, interrupted, running or lost."""
        return record.status_now(self.record)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """All parameters of the notebook, with the run's values."""
        file = self.folder / "parameters.yaml"
        return parameters.read_file(file) if file.is_file() else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, GPUs, commit."""
        return self._json("environment.json", {})

    @cached_property
    def metrics(self):
        """metrics.csv, a row a measured number, columns `workbook.runs.metrics.COLUMNS`, then a
        column for each setting in which rows of one backend, metric and x differ."""
        return metrics.with_settings(self.stored_metrics)

    @cached_property
    def stored_metrics(self):
        """metrics.csv as it is, without columns for settings."""
        file = self.folder / "metrics.csv"
        try:
            return metrics.read(file)[list(metrics.COLUMNS)]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{file} is no table as a run writes it: {error}") from error

    @cached_property
    def verdicts(self):
        """Table with a row a claim: verdict, claim, device, evidence."""
        import pandas

        columns = ["verdict", "claim", "device", "evidence"]
        return pandas.DataFrame(self._json("verdicts.json", []), columns=columns)

    @cached_property
    def verdict(self) -> str:
        """Worst of the verdicts."""
        return store.overall(self._json("verdicts.json", []))

    @property
    def figures(self) -> dict[str, Path]:
        """{name: its SVG, else another format}; a notebook displays one with IPython's SVG."""
        files = sorted((self.folder / "figures").glob("*.*"), key=lambda f: f.suffix == ".svg")
        return {file.stem: file for file in files}

    def explore(self):
        """Browse the run's numbers: the quantity, its x axis, and the setup."""
        return explore(self)

    def _json(self, name: str, missing: Any) -> Any:
        file = self.folder / name
        if not file.is_file():
            return missing
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged, it is no JSON: {error}") from None

    def __repr__(self) -> str:
        try:
            facts = [" and ".join(self.stored_metrics["device"].unique())]
            facts.append(environment.provenance(self.environment)["commit"])
            verdict = f", {self.verdict}" if self.verdict else ""
        except ValueError as error:
            return f"<run {self.id}: damaged; {error}>"
        where = ", ".join(fact for fact in facts if fact)
        return f"<run {self.id}: {self.status}{verdict}; {where or 'no rows'}>"


def load(run: str | Path, root: str | Path | None = None) -> LoadedRun:
    """Load a stored run by its folder, its id, a prefix of it, or `latest`.

    root: the folder of runs; by default `runs` here or in a folder above, so a notebook finds those
    of its project. ValueError if there is no such run, naming the nearest.
    """
    folder = Path(run).expanduser()
    if folder.is_dir() and not (folder / "record.json").is_file():
        raise ValueError(f"{run} is no run's folder, it has no record.json; `nsa runs` lists those")
    if folder.is_dir():
        return LoadedRun(folder)
    root = runs_root() if root is None else Path(root)
    name = str(run).strip("/")
    return LoadedRun(store.open_store(root).find(name.removeprefix(f"{root.name}/")))


def runs_root() -> Path:
    """Folder `runs` of the working folder, or of the nearest folder above it that has one."""
    here = Path(os.getcwd())
    found = (folder / "runs" for folder in (here, *here.parents))
    return next((folder for folder in found if folder.is_dir()), here / "runs")


def explore(*runs: LoadedRun | str | Path, root: str | Path | None = None) -> Any:
    """Overlay the numbers of these runs of one notebook; without any, browse all runs below `root`
    (by default `runs_root()`), or say that there are none. Widgets where they can be moved, else
    pictures. ValueError for runs of several notebooks, or without a row."""
    return browser(*runs, root=root).show()


def browser(
    *runs: LoadedRun | str | Path, root: str | Path | None = None, quantity: str = ""
) -> Panel:
    """Panel of `explore`; quantity: the one shown first."""
    opened = [run if isinstance(run, LoadedRun) else load(run, root) for run in runs]
    notebooks = {str(run.record.get("notebook") or run.id.rpartition("-")[0]) for run in opened}
    if len(notebooks) > 1:
        raise ValueError(
            f"runs of {' and '.join(sorted(notebooks))} measured different things; "
            "give runs of one notebook"
        )
    if opened:
        library = {next(iter(notebooks)): opened}
    else:
        root = runs_root() if root is None else Path(root)
        library = {}
        for folder in reversed(store.open_store(root).folders()):
            run = LoadedRun(folder)
            library.setdefault(str(run.record.get("notebook", "")), []).append(run)
    library = {name: list(filter(_has, library[name])) for name in sorted(library)}
    library = {name: runs for name, runs in library.items() if runs}
    if not library:
        what = ", ".join(run.id for run in opened) or f"runs below {root}"
        text = f"no rows to look through in {what}; a run that ended well has some"
        if opened:
            raise ValueError(text)
        # a folder without runs is a beginning, not a mistake
        views = {"no runs": lambda: looks.nothing(text)}
        return Panel({}, views, lambda: [text], lambda start: {})
    return _panel(library, bool(opened), quantity)


def _has(run: LoadedRun) -> bool:
    """True if the run has rows, which is faster than reading them."""
    try:
        with (run.folder / "metrics.csv").open("rb") as file:
            return bool(file.readline() and file.readline())
    except OSError:
        return False


def _reach(run: LoadedRun) -> int:
    """Number of x values that the run measured; 0 for a damaged one."""
    try:
        return run.stored_metrics["x_value"].nunique()
    except ValueError:
        return 0


def _panel(library: Mapping[str, Sequence[LoadedRun]], given: bool, quantity: str) -> Panel:
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


def _started(run: LoadedRun) -> str:
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


def unlike(runs: Sequence[LoadedRun]) -> list[str]:
    """Differences that prevent a like-for-like comparison of these runs: parameters, devices and
    versions, one sentence each."""
    if len(runs) < 2:
        return []
    facts: dict[str, list[str]] = {}
    for run in runs:
        known = environment.provenance(run.environment)
        known["device"] = store.Run(run.folder).devices()
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


def _about(run: LoadedRun) -> str:
    facts = environment.provenance(run.environment)
    parts = [str(run.record.get("started"))[:10], store.Run(run.folder).devices()]
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
