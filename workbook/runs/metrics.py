"""metrics.csv: one long table, the same columns for every notebook, so any script reads any run."""

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from nsa.spelling import nearest
from workbook.runs.claim import ANSWERS
from workbook.runs.files import plain

NUMBERS = ("x_value", "median", "q20", "q80")
MEASURED = ("operation", "backend", "mode", "metric", "unit", "x_name", *NUMBERS, "config")
COLUMNS = (*MEASURED, "device", "torch", "triton", "commit", "date")
CURVE = ("operation", "backend", "mode", "metric", "x_name")
ENDED = ("outcome", "message", "checked", "alone")  # keys of a config on how it went, no settings
# Settings that precede all others: of two that separate the same rows the later is dropped.
FIRST = ("preset", "model", "layers", "attention", "heads", "kv_heads", "dim", "dtype", "queries",
         "batch", "tokens", "window")  # fmt: skip


def row(given: dict, facts: dict) -> dict:
    """Complete row: `config` as JSON, missing texts empty, missing numbers NaN, `facts` added.

    ValueError names a column that does not exist, a row without operation, metric or device, or a
    value that is not a number.
    """
    for name in given:
        if name not in COLUMNS:
            raise ValueError(f"metrics have no column {name!r}; {nearest(name, COLUMNS, 0)}")
    full = {name: _cell(name, given.get(name)) for name in COLUMNS}
    full |= {name: value for name, value in facts.items() if not full[name]}
    for name in ("operation", "metric", "device"):
        if not full[name]:
            raise ValueError(f"a metrics row needs {name!r}; got only {sorted(given)}")
    return full


def values(metric: str, unit: str, *numbers: float | None, **columns: Any) -> dict[str, Any]:
    """Columns of one measurement: the median and the 20 % and 80 % quantiles, or one number that
    is all three; `columns`, as mode, are added."""
    three = numbers if len(numbers) == 3 else 3 * numbers
    named = {"metric": metric, "unit": unit, **columns}
    return named | dict(zip(("median", "q20", "q80"), three, strict=True))


def _cell(name: str, value) -> str | float:
    if name in NUMBERS:
        try:
            return float("nan" if value is None else value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number, got {value!r}") from None
    if name == "config" and not isinstance(value, str):
        return json.dumps(plain({} if value is None else value), sort_keys=True)
    # a table read with pandas has NaN for an empty text
    return "" if value is None or value != value else str(value)


def table(rows: list[dict]):
    """Rows as a DataFrame with exactly COLUMNS."""
    import pandas

    return pandas.DataFrame(rows, columns=list(COLUMNS))


def read(path: str | Path):
    """Read a metrics.csv as a DataFrame: numbers as float, the rest as text; empty without a file.

    Runs before December 2026 have `gpu`, the machine's, instead of `device`.
    """
    import pandas

    if not Path(path).is_file():
        return table([])
    texts = dict.fromkeys({*COLUMNS, "gpu"} - {*NUMBERS}, str)
    nothing = {name: [""] for name in NUMBERS}
    found = pandas.read_csv(path, dtype=texts, keep_default_na=False, na_values=nothing)
    return found.astype(dict.fromkeys(NUMBERS, float)).rename(columns={"gpu": "device"})


def on_gpu(frame) -> bool:
    """True if there are rows and all of them were measured on GPUs."""
    return bool(len(frame)) and all(map(is_gpu, frame["device"]))


def is_gpu(device: str) -> bool:
    """True if a row's `device` is a GPU."""
    return device[:3] not in ("", "cpu")


def configs(frame):
    """Config column as a list of dicts; an entry that is no JSON object becomes an empty one."""

    def read_one(text):
        with contextlib.suppress(TypeError, ValueError):
            text = json.loads(text)
        return text if isinstance(text, dict) else {}

    return [read_one(text) for text in frame["config"]]


def model_name(config: dict) -> str:
    """Model name as in every table and plot, e.g. "repro, 5 layers"."""
    name, layers = str(config.get("preset") or config.get("model") or ""), config.get("layers")
    depth = f"{layers} layer{'s' if layers != 1 else ''}" if layers else ""
    return ", ".join(filter(None, (name, depth)))


def unmeasured(rows, *axes: Sequence[str], of: Mapping[str, Collection] | None = None) -> list[str]:
    """Names of the points that a claim lacks.

    rows: with `outcome` as a column, and without a median if there is no value. of: restricts the
    claim to rows with these values in these columns. A point is missing if its row has no median
    and did not end in an answer, or if the grid has no row there: an axis is a list of columns, its
    places are all values of the rows in them, the grid is their product.
    """
    of, mine = of or {}, rows
    for name, values in of.items():
        mine = mine[mine[name].isin(values)]
    columns = [*chain(*axes), *of]
    lost = mine[mine["median"].isna() & ~mine["outcome"].isin(ANSWERS)]
    there = dict.fromkeys(_points(mine, columns))
    places = [dict.fromkeys(_points(rows, axis)) for axis in axes]
    places += [dict.fromkeys(_points(mine, [name])) for name in of]
    grid = (tuple(chain(*point)) for point in product(*places))
    points = [*_points(lost, columns), *(point for point in grid if point not in there)]
    return [", ".join(str(value) for value in point if value != "") for point in points]


def _points(rows, columns: Sequence[str]) -> list[tuple]:
    return list(zip(*(rows[name] for name in columns), strict=True))


def with_settings(frame):
    """Add a column for each setting of `config` in which rows differ, at any x, as few as separate
    all rows: rows that agree in them and in CURVE lie on one curve."""
    import pandas

    settings = configs(frame)
    keys = list(frame[list(CURVE)].astype(str).itertuples(index=False, name=None))
    over = set(frame["x_name"])  # the axis is no setting
    names = {n for config in settings for n in config} - {*ENDED, *COLUMNS} - over
    parts = frame["operation"] if "run" not in frame else frame["run"] + "/" + frame["operation"]
    order = {name: place for place, name in enumerate(FIRST)}
    found: dict[str, list] = {}
    for name in sorted(names, key=lambda n: (order.get(n, len(order)), n)):
        values = [config.get(name) for config in settings]
        there = pandas.Series([value is not None for value in values], frame.index, dtype=bool)
        partly = there.groupby(parts).nunique().gt(1).any()
        if partly or any(isinstance(v, float) for v in values):
            continue  # a measured number, or known only if it ended well
        values = [json.dumps(v) if isinstance(v, dict | list) else v for v in values]
        finer = [(*key, str(value)) for key, value in zip(keys, values, strict=True)]
        if len(set(finer)) > len(set(keys)):
            keys, found[name] = finer, pandas.Series(values, frame.index, dtype=object)
    return frame.assign(**found)
