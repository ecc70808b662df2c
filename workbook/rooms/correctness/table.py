"""Tables of the correctness notebook, and its rows for metrics.csv. Draws nothing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from workbook.rooms.correctness.gallery import RIGHT, Seen, check_names
from workbook.rooms.correctness.lessons import lesson
from workbook.rooms.correctness.mutants import MUTANTS, ROOT
from workbook.runs import metrics
from workbook.runs.store import Run, Store

VISIBLE = 1e-4  # of a weight or gradient: more than rounding between the dtypes of two backends


def oracle(rows: Sequence[dict]) -> pandas.DataFrame:
    """Table with a row per backend and dtype: worst error / limit of o and of the gradients."""
    found: dict[tuple[str, str], dict] = {}
    for row in rows:
        if row["kind"] != "backend":
            continue
        line = found.setdefault((row["who"], row["dtype"]), {"tensors held": 0, "why not": ""})
        if row["outcome"] != "held":
            line["why not"] = row["message"]
        if row["outcome"] in ("held", "red"):
            column = "o, of the limit" if row["tensor"] == "o" else "gradients, of the limit"
            share = row["error"] / row["limit"] if row.get("limit") else np.inf
            line[column] = max(line.get(column, 0.0), share)
            line["tensors held"] += row["outcome"] == "held"
    columns = ["o, of the limit", "gradients, of the limit", "tensors held", "why not"]
    table = pandas.DataFrame(list(found.values()), columns=columns)
    table.index = pandas.MultiIndex.from_tuples(found, names=["backend", "dtype"])
    for column in columns[:2]:
        table[column] = ["-" if x != x else f"{x:.0%}" for x in table[column]]
    return table


def impostors(rows: Sequence[dict]) -> pandas.DataFrame:
    """Table with a row per impostor and shape: the rule's outcome and the error."""
    chosen = [row for row in rows if row["kind"] == "impostor"]
    table = pandas.DataFrame(chosen, columns=["who", "shape", "outcome", "error"])
    return table.assign(error=[f"{x:.1e}" for x in table["error"]]).set_index(["who", "shape"])


def difference(seen: Seen, all_seen: Sequence[Seen]) -> np.ndarray | None:
    """Picture of the mutant minus that of correct code in its view; None if one is missing."""
    place = (RIGHT, seen.view, seen.backend)
    for one in all_seen:
        if (one.mutant, one.view, one.backend) == place and one.picture and seen.picture:
            return np.array(seen.picture) - np.array(one.picture)
    return None


def gallery(all_seen: Sequence[Seen]) -> pandas.DataFrame:
    """Table with a row per mutant: its defect, the view, how much of the picture is wrong."""
    columns = ["mutant", "what the defect is", "view", "rows that are wrong", "sees the future"]
    found = []
    for seen in all_seen:
        if seen.mutant == RIGHT:
            continue
        wrong = difference(seen, all_seen)
        view, rows, future = f"{seen.view.replace('_', ' ')}, {seen.backend}", seen.message, "-"
        if wrong is not None:
            lines = (np.abs(wrong) > VISIBLE).any(1)
            rows = f"{lines.sum()} of {len(lines)}"
            # A gradient's picture has no place for later tokens.
            if wrong.shape[0] == wrong.shape[1] and seen.view != "recomputed":
                future = "yes" if (np.triu(seen.picture, 1) > VISIBLE).any() else "no"
        found.append((seen.mutant, MUTANTS[seen.mutant].defect, view, rows, future))
    return pandas.DataFrame(found, columns=columns).set_index("mutant")


def killers(all_seen: Sequence[Seen], killed: Sequence[dict]) -> pandas.DataFrame:
    """Table with a row per mutant: the test that kills it, and its outcome if run here."""
    ran = {row["mutant"]: row["outcome"] for row in killed}
    shown = [name for name in MUTANTS if name in {seen.mutant for seen in all_seen}]
    found = {
        "killed by": [MUTANTS[name].killer.partition("::")[2] for name in shown],
        "run here": [ran.get(name, "not in this run") for name in shown],
    }
    return pandas.DataFrame(found, index=pandas.Index(shown, name="mutant"))


def lessons(rows: Sequence[dict]) -> pandas.DataFrame:
    """Table with a row per mutant, and correct attention per lesson: accuracy, loss, peek."""
    last = "as right attention"
    columns = ["mutant", "lesson", "T", "backend", "steps", "accuracy", "loss", "peek", last]
    found = []
    for row in rows:
        line = {name: row.get(name, "-") for name in ("mutant", "lesson", "backend", "steps")}
        line |= {"T": row.get("tokens", "-"), "accuracy": row["message"], last: row["outcome"]}
        if row["outcome"] == "ok":
            wanted = row["expected"]
            line["accuracy"] = ", ".join(
                f"{name} {value:.2f}{'' if wanted[name] else ' (out of reach)'}"
                for name, value in row["accuracy"].items()
            )
            line |= {"loss": f"{row['loss']:.4f}", "peek": f"{row['peek']:.2g}"}
            line[last] = "yes" if row["as_expected"] else "no"
        found.append(line)
    return pandas.DataFrame(found, columns=columns).fillna("-").set_index("mutant")


def to_metrics(oracle_rows: Sequence[dict], lesson_rows: Sequence[dict]) -> list[dict]:
    """Rows of metrics.csv; a lesson's complete row is stored in its config, to be read back."""
    rows = []
    for row in oracle_rows:
        mode = "forward" if row["tensor"] == "o" else "backward"
        line = {"operation": "nsa_attention", "backend": row["who"], "mode": mode}
        line |= {"metric": "error", "unit": "of the largest", "median": row.get("error")}
        config = {name: row[name] for name in ("shape", "dtype", "tensor", "outcome", "kind")}
        rows.append(line | {"config": config})
    for row in lesson_rows:
        line = {"operation": "lesson", "backend": row.get("backend"), "mode": "step"}
        line |= {"metric": "loss", "unit": "nats", "median": row.get("loss")}
        line |= {"x_name": "tokens", "x_value": row.get("tokens")}
        kept = json.dumps({name: value for name, value in row.items() if name != "curve"})
        rows.append(line | {"config": {"lesson_row": kept}})
    return rows


def kept_lessons(run: str, root: str | Path = ROOT / "runs") -> list[dict]:
    """Read rows of `gallery.learn` back from a kept run's metrics, without curves.

    Raises ValueError for a run that does not exist or has no lessons.
    """
    folder = Store(root).find(run)
    df = Run(folder).metrics()
    rows = df[df["operation"] == "lesson"]
    if not len(rows):
        raise ValueError(f"run {folder.name} holds no lessons; name one of 00_correctness")
    return [json.loads(config["lesson_row"]) for config in metrics.configs(rows)]


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for mutants, tasks, a query or a kept run that do not exist, in the
    parameters of 00_correctness and 04_throughput."""
    for name in ("mutants", "lessons", "killers"):
        check_names(values.get(name, ()))
    for name in values.get("tasks", ()):
        lesson(name, values["task_tokens"])
    if "query" in values and values["query"] >= values["tokens"]:
        raise ValueError(f"query={values['query']} must be below tokens={values['tokens']}")
    if kept := values.get("lessons_from") or values.get("mutants_from"):
        kept_lessons(kept)
