"""From runs to the table that `auto` goes by: nsa/attention/measured.json."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from statistics import mean

from nsa.attention import measured, registry
from nsa.config import NSAConfig
from nsa.workbook import metrics
from nsa.workbook.files import read_json, write_atomically

OPERATION = "nsa_attention"
FACTS = ("gpu", "torch", "triton", "commit", "date")


def write(folders: Iterable[str | Path], path: str | Path = measured.TABLE) -> dict:
    """Writes and returns the table of the runs in `folders`, nothing else kept.

    Taken are rows of operation "nsa_attention", metric "latency" in ms, mode forward or backward,
    of a backend in the registry, from a run on a GPU, as `comparison.text` makes them. A
    backend's median counts as the mean over the kinds of inputs (queries, shared_kv) that some
    backend was measured with at the shape; a backend that lacks one is left out. ValueError for a
    run without any such row.
    """
    table: dict = {"runs": {}, "rows": []}
    for folder in map(Path, folders):
        found = list(_rows(folder))
        if not found:
            raise ValueError(f"{folder.name} has no latencies of backends measured on a GPU")
        frame = metrics.read(folder / "metrics.csv")
        facts = {name: str(frame[name].iloc[0]) for name in FACTS}
        environment = read_json(folder / "environment.json")
        capability = environment["gpus"][0]["compute_capability"]
        table["runs"][folder.name] = facts | {"compute_capability": capability}
        table["rows"] += [{"run": folder.name, **row} for row in found]
    write_atomically(Path(path), _as_text(table))
    measured.rows.cache_clear()
    measured.nearest.cache_clear()
    return table


def _rows(folder: Path) -> Iterable[dict]:
    """Rows of the table, in the order in which a run measured its shapes."""
    # shape -> direction -> backend -> kind of inputs -> ms
    shapes: dict[str, dict] = {}
    if not read_json(folder / "environment.json", {}).get("gpus"):
        return
    frame = metrics.read(folder / "metrics.csv")
    for row, config in zip(frame.to_dict("records"), metrics.configs(frame), strict=True):
        shape = _shape(row, config)
        if shape is None:
            continue
        name = json.dumps(shape, sort_keys=True)
        directions = shapes.setdefault(name, {d: defaultdict(dict) for d in measured.DIRECTIONS})
        kind = config.get("queries"), config.get("shared_kv")
        directions[row["mode"]][row["backend"]][kind] = row["median"]
    for name, directions in shapes.items():
        latency = {direction: _means(found) for direction, found in directions.items()}
        yield json.loads(name) | {"latency_ms": {d: x for d, x in latency.items() if x}}


def _shape(row: dict, config: dict) -> dict | None:
    """The sizes of a row that belongs in the table; None for any other row."""
    wanted = row["operation"] == OPERATION and row["metric"] == "latency" and row["unit"] == "ms"
    known = row["backend"] in registry.names() and row["mode"] in measured.DIRECTIONS
    if not wanted or not known or not isfinite(row["median"]):
        return None
    if row["x_name"] == "tokens":
        config = {"tokens": int(row["x_value"]), **config}
    if any(name not in config for name in (*measured.SIZES, "dtype")):
        return None
    sizes = {f.name: config[f.name] for f in fields(NSAConfig) if f.name in config}
    shape = {name: int(config[name]) for name in measured.SIZES}
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    shape["dtype"] = dtype.get(config["dtype"], config["dtype"])
    return shape | {"config": asdict(NSAConfig(**sizes))}


def _means(by_backend: dict[str, dict[tuple, float]]) -> dict[str, float]:
    """{backend: ms}, each over the same kinds of inputs; one that lacks a kind is left out."""
    kinds = {kind for found in by_backend.values() for kind in found}
    whole = {name: found for name, found in by_backend.items() if set(found) == kinds}
    return {name: round(mean(found.values()), 4) for name, found in whole.items()}


def _as_text(table: dict) -> str:
    """JSON with a line a run and a line a shape, so that a change of the table can be read."""
    runs = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table["runs"].items())
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table["rows"])
    return f'{{"runs": {{\n{runs}\n}}, "rows": [\n{rows}\n]}}\n'
