"""Tables of a distributed trace, and the evidence files of its run."""

from collections.abc import Iterable
from pathlib import Path

import pandas

from workbook.lab.search.planted import planted
from workbook.rooms.tracing.trials import COLUMNS, Traced, Trial, why
from workbook.runs.files import write_atomically

WHO = ["trial", "rank", "step"]
STATES = ("arrived", "missing", "zero")
OUTCOME = [
    "trial", "rank", "status", "first", "place", "losses", "weights", "message", "evidence",
]  # fmt: skip


def evidence(traced: Traced) -> dict[str, pandas.DataFrame]:
    """Make the tables of the run's evidence files, by name; `step` counts from 1.

    all_missing_params: every gradient that is missing or zero, with its `expected` state and
    `planted`. arrival_by_rank: a row per parameter, step and trial, with order, ms and state of
    each rank. ddp_buckets, module_order: all rows. rank_outcomes: how each rank ended each trial,
    with the traceback or stacks of one that failed.
    """
    arrivals = frame(traced, "arrivals")
    missing = arrivals[arrivals["state"] != "arrived"].copy()
    ranks = range(traced.setup.ranks)
    spoilt = {(t.name, r): planted_in(traced, t, r) for t in traced.trials for r in ranks}
    missing["planted"] = [row.parameter in spoilt[row.trial, row.rank]
                          for row in missing.itertuples()]  # fmt: skip
    columns = [*WHO, "parameter", "state", "expected", "planted"]
    return {
        "all_missing_params": missing[columns].reset_index(drop=True),
        "arrival_by_rank": by_rank(arrivals),
        "ddp_buckets": frame(traced, "buckets"),
        "module_order": frame(traced, "modules"),
        "rank_outcomes": pandas.DataFrame(traced.outcomes, columns=OUTCOME),
    }


def write_evidence(folder: str | Path, traced: Traced) -> pandas.DataFrame:
    """Write the evidence as CSV files into `folder`; return their names and row counts."""
    rows = []
    for name, table in evidence(traced).items():
        write_atomically(Path(folder, f"{name}.csv"), table.to_csv(index=False))
        rows.append({"file": f"{name}.csv", "rows": len(table)})
    return pandas.DataFrame(rows)


def frame(traced: Traced, kind: str, *trials: str, step: int | None = None) -> pandas.DataFrame:
    """Rows of one kind, with COLUMNS; only of the named trials, if any, and one step."""
    table = pandas.DataFrame(getattr(traced, kind), columns=["trial", "rank", *COLUMNS[kind]])
    if kind == "arrivals":
        table["order"] = table["order"].astype("Int64")  # missing ones have none
    if trials:
        table = table[table["trial"].isin(trials)]
    return table if step is None else table[table["step"] == step]


def by_rank(arrivals: pandas.DataFrame) -> pandas.DataFrame:
    """Pivot to a row per trial, step and parameter, with state, order and ms of each rank.
    `same`: every rank has the same state and order."""
    keys = ["trial", "step", "parameter"]
    ranks = sorted(set(arrivals["rank"]))
    table = arrivals[keys].drop_duplicates().set_index(keys)
    for rank in ranks:
        mine = arrivals[arrivals["rank"] == rank].set_index(keys)
        for name in ("state", "order", "ms"):
            table[f"{name}_{rank}"] = mine[name]
    state, order = (table[[f"{name}_{rank}" for rank in ranks]] for name in ("state", "order"))
    same = [columns.nunique(axis=1, dropna=False) == 1 for columns in (state, order)]
    return table.assign(same=same[0] & same[1]).reset_index()


def outcomes(traced: Traced) -> pandas.DataFrame:
    """Table with a row per trial: its ranks' outcomes, losses, and equality of final weights."""
    rows = []
    for trial in traced.trials:
        mine, losses = traced.of(trial.name), traced.losses(trial.name)
        equal = "yes" if len({row["weights"] for row in mine}) == 1 else "no"
        ended = ", ".join(dict.fromkeys(row["status"] for row in mine))
        told = ", ".join(f"{loss:.4f}" for loss in losses)
        rows.append((trial.name, ended, told, equal if losses else "", why(mine)))
    columns = ["trial", "ended", "losses", "equal weights", "why"]
    return pandas.DataFrame(rows, columns=columns).set_index("trial")


def counts(traced: Traced) -> pandas.DataFrame:
    """Counts of arrived, missing and zero gradients of step 1, and of unexpected ones."""
    rows = frame(traced, "arrivals", step=1)
    found = {state: rows["state"] == state for state in STATES}
    found["unexpected"] = rows["state"] != rows["expected"]
    return rows.assign(**found).groupby(["trial", "rank"], sort=False)[list(found)].sum()


def unexpected(traced: Traced, step: int | None = None) -> pandas.DataFrame:
    """Table of unexpectedly missing or zero gradients, a column per rank; of one step or all."""
    table = frame(traced, "arrivals", step=step)
    wrong = table[table["state"] != table["expected"]]
    keys = ["trial", "step", "parameter"]
    wide = table.pivot(index=keys, columns="rank", values="state")
    wide = wide.loc[wide.index.isin(pandas.MultiIndex.from_frame(wrong[keys]))]
    order = {trial.name: number for number, trial in enumerate(traced.trials)}
    wide = wide.sort_index(key=lambda index: index.map(order) if index.name == "trial" else index)
    return wide.rename(columns="rank {}".format).rename_axis(columns=None)


def buckets(traced: Traced) -> pandas.DataFrame:
    """Table of the elements of each bucket, a row per trial, a column per step; one layout if all
    ranks agree, else each. Empty if no rank traced any."""
    rows: dict[str, dict[str, str]] = {}
    for trial in dict.fromkeys(row["trial"] for row in traced.buckets):
        for step, by_rank in layouts(traced, trial).items():
            said = dict.fromkeys(" + ".join(f"{n:,}" for n in e) for e in by_rank.values())
            rows.setdefault(trial, {})[f"step {step}"] = " | ".join(said)
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("trial")


def layouts(traced: Traced, trial: str) -> dict[int, dict[int, list[int]]]:
    """Return {step: {rank: elements of its buckets}} of one trial."""
    found: dict[int, dict[int, list[int]]] = {}
    table = frame(traced, "buckets", trial).sort_values("index")
    for (step, rank), mine in table.groupby(["step", "rank"]):
        found.setdefault(step, {})[rank] = [int(n) for n in mine["elements"]]
    return found


def gradients(traced: Traced) -> pandas.DataFrame:
    """Table of the ranks' gradient errors against one process: worst rank and parameter per way."""
    table = frame(traced, "gradients")
    if not len(table):
        return table
    worst = table.loc[table.groupby(["trial", "way"], sort=False)["error"].idxmax()]
    return worst.drop(columns="rank").set_index(["trial", "way"])


def modules(traced: Traced, trial: str, step: int) -> pandas.DataFrame:
    """Table of the start of each module's backward, in ms since the backward began, by rank."""
    table = frame(traced, "modules", trial, step=step)
    wide = table.pivot(index="module", columns="rank", values="ms")
    first = table[table["rank"] == table["rank"].min()].sort_values("order")["module"]
    return wide.loc[list(first)].rename(columns="rank {}, ms".format).rename_axis(columns=None)


def to_metrics(traced: Traced) -> list[dict]:
    """Rows of metrics.csv: losses, counts of gradients, buckets and gradient errors, by rank."""
    setup = traced.setup
    names = ("preset", "layers", "tokens", "batch", "ranks", "device", "communication", "bucket_mb")
    common = {name: getattr(setup, name) for name in names} | {"dtype": setup.precision}
    step_of = {"operation": "distributed_step", "backend": setup.backend, "mode": "step"}
    rows = []

    def add(trial, rank, metric, value, step=1, unit="count", **more):
        config = {**common, "trial": trial, "rank": rank, **more}
        row = {"metric": metric, "unit": unit, "median": value, "config": config}
        rows.append(step_of | {"x_name": "step", "x_value": step} | row)

    for row in traced.outcomes:
        for step, loss in enumerate(row["losses"] or [None], 1):
            more = {"outcome": row["status"], "weights": row["weights"]}
            add(row["trial"], row["rank"], "loss", loss, step, "nats", **more)
    for (trial, rank, step), mine in frame(traced, "arrivals").groupby(WHO, sort=False):
        for state in STATES:
            add(trial, rank, f"gradients_{state}", int((mine["state"] == state).sum()), step)
    for (trial, rank, step), mine in frame(traced, "buckets").groupby(WHO, sort=False):
        add(trial, rank, "buckets", len(mine), step)
    for row in traced.gradients:
        add(row["trial"], row["rank"], "gradient_error", row["error"], 1, "", way=row["way"])
    return rows


def planted_in(traced: Traced, trial: Trial, rank: int) -> tuple[str, ...]:
    """Parameters whose gradients a trial's fault spoils on this rank; none without a fault."""
    if trial.fault is None:
        return ()
    fault = planted(trial.fault, traced.setup.spec(trial).config(), traced.setup.ranks)
    return fault.parameters if rank in fault.ranks else ()


def facts(traced: Traced, chosen: Iterable[Trial]) -> list[str]:
    """Machine-independent lines: outcomes of trials, row counts, the order of arrival."""
    lines = []
    for trial in chosen:
        mine, steps = traced.of(trial.name), len(traced.losses(trial.name))
        ends = ", ".join(dict.fromkeys(row["status"] for row in mine))
        lines.append(f"{trial.name}: {ends}, {steps} steps on {len(mine)} ranks")
    lines += [f"{name}.csv: {len(found)} rows" for name, found in evidence(traced).items()]
    rows = frame(traced, "arrivals", "ddp", step=1)
    rows = rows[rows["rank"] == 0].dropna(subset="order").sort_values("order")
    order = list(rows["parameter"])
    told = f"{', '.join(order[:2])}, ... {', '.join(order[-1:])}"
    return [*lines, f"ddp: {len(order)} arrivals, {told}"]
