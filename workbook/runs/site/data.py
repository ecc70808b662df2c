"""Data of the site on a run: a mapping that is JSON."""

import json
import re
from pathlib import Path
from typing import Any

from workbook.runs import environment, identity, metrics, parameters, record, store
from workbook.runs.files import plain, read_json

COLUMNS = ("operation", "backend", "mode", "metric", "unit", "x_name", "device")
NUMBERS = metrics.NUMBERS
# Keys of a row's config on how it went, not on what was measured.
FOUND = {"outcome", "message", "checked", "weights", "timing", "found", "rule", "right", "skipped"}
FOUND |= {"parameters", "why", "holds", "evidence", "verdict", "device_name", "old_rule"}
TRIAL = re.compile(r"[0-9a-f]{12}(-\d+)?")
FACTS = ("python", "platform", "cpu", "nsa", "torch", "cuda", "triton", "flash_attn",
         "flash_attn_4", "seed")  # fmt: skip


def collect(folder: Path, root: Path) -> dict[str, Any]:
    """Collect all of a run except its notebook. A file that cannot be read is left out and named
    under `damaged`."""
    damaged = []

    def of(file: str, read, nothing):
        if not (folder / file).is_file():
            return nothing
        try:
            found = read(folder / file)
            if not isinstance(found, type(nothing)):
                raise ValueError(f"a {type(found).__name__} is no {type(nothing).__name__}")
            return found
        # whatever was edited in a file by hand, the other runs still have to be shown
        except Exception as error:
            damaged.append(f"{file}: {str(error).splitlines()[0] if str(error) else error!r}")
            return nothing

    def json_file(path: Path):
        return json.loads(path.read_text(encoding="utf-8"))

    about = of("record.json", json_file, {})
    facts = of("environment.json", json_file, {})
    verdicts = [v for v in of("verdicts.json", json_file, []) if isinstance(v, dict)]
    table = of("metrics.csv", metrics.read, metrics.table([]))
    git = facts.get("git") or {}
    gpus = facts.get("gpus") or []
    commit = environment.provenance(facts)["commit"]
    notebook = about.get("notebook") or folder.name.rpartition("-")[0]
    given = of("parameters.yaml", parameters.read_file, {})
    # a question with parameters in its text differs between runs
    question = given.get("question") or about.get("question") or ""
    book = read_json(folder / "notebook.ipynb", {})  # the run's page says if it cannot be read
    content = {
        "run": folder.relative_to(root).as_posix(),
        "notebook": notebook,
        "status": record.status_now(about),
        "question": str(question),
        "asks": asks(book, about.get("question") or "", notebook),
        "started": about.get("started") or f"{folder.parent.name}T00:00:00+00:00",
        "seconds": about.get("seconds"),
        "message": about.get("message") or "",
        "verdict": store.overall(verdicts),
        "verdicts": [{k: str(v.get(k, "")) for k in ("verdict", "claim")} for v in verdicts],
        "notes": of("notes.txt", lambda path: path.read_text(encoding="utf-8"), "").splitlines(),
        "device": sorted(set(table["device"]) - {""}) or sorted({g["name"] for g in gpus}),
        "commit": commit,
        "parameters": given,
        "facts": {key: facts[key] for key in FACTS if facts.get(key) is not None}
        | {"gpus": ", ".join(g["name"] for g in gpus) or "none"}
        | {"driver": ", ".join(sorted({str(g.get("driver", "")) for g in gpus}))}
        | {"commit": commit, "changes": (git.get("dirty_hash") or "")[:12]}
        | facts.get("allocator", {})
        | facts.get("variables", {}),
        "rows": columns(table),
        "damaged": damaged,
    }
    return plain(content)


def asks(book: dict[str, Any], question: str, name: str) -> str:
    """Question of a notebook in one sentence: its heading, after the name before the colon, or a
    sentence of `question` that asks, or its name."""
    try:
        heading = identity.title(book["cells"])
    except (KeyError, TypeError, AttributeError):
        heading = ""
    sentences = re.findall(r"[^.?!]+\?", question)
    asked = heading.partition(": ")[2] or (sentences or [heading or name])[0].strip()
    return asked[:1].upper() + asked[1:].rstrip("?. ") + "?"


def columns(table) -> dict[str, Any]:
    """Metrics table, column by column: numbers as a list (null if not measured), each other column
    as its values and, for each row, the number of its value.

    `by` names the columns that separate rows of one run beyond COLUMNS and x.
    """
    configs = metrics.configs(table)
    fields = sorted({key for config in configs for key in config} - {*FOUND, *COLUMNS})
    columns = {name: table[name].tolist() for name in COLUMNS}
    columns |= {f: [_scalar(config.get(f)) for config in configs] for f in fields}
    telling = {f: columns[f] for f in fields if _tells(columns[f])}
    keys = list(zip(*(columns[n] for n in COLUMNS), table["x_value"].fillna(-1), strict=True))
    kept = [*COLUMNS, *telling]
    return {
        "by": apart(keys, telling),
        "columns": {name: _coded(columns[name]) for name in kept},
        **{name: [None if v != v else v for v in table[name].tolist()] for name in NUMBERS},
        "outcome": _coded([config.get("outcome") for config in configs]),
    }


def apart(keys: list[tuple], fields: dict[str, list]) -> list[str]:
    """Fewest fields that separate the rows whose keys are equal, the most selective first."""
    chosen: list[str] = []
    while True:
        now = len(set(keys))
        gains = {
            field: len({(*key, v) for key, v in zip(keys, values, strict=True)}) - now
            for field, values in fields.items()
            if field not in chosen
        }
        # of two that separate as much, the one with fewer values: the setting, not the outcome
        best = min(gains, key=lambda f: (-gains[f], len(set(fields[f])), f), default=None)
        if best is None or not gains[best]:
            return chosen
        chosen.append(best)
        keys = [(*key, v) for key, v in zip(keys, fields[best], strict=True)]


def _tells(values: list) -> bool:
    """True for a setting: scalars that differ; not floats, which are measured, nor trial ids."""
    try:
        values = set(values)
    except TypeError:  # a list
        return False
    if any(isinstance(v, str) and TRIAL.fullmatch(v) for v in values):
        return False
    return not any(isinstance(v, float) and v != int(v) for v in values if v == v)


def _scalar(value: Any) -> Any:
    """Mapping of changes as text, None if it is empty; other values unchanged."""
    return (
        (json.dumps(value, sort_keys=True) if value else None) if isinstance(value, dict) else value
    )


def _coded(values: list) -> dict[str, list]:
    known: dict[tuple[str, Any], int] = {}
    codes = [known.setdefault((type(v).__name__, v), len(known)) for v in values]
    return {"values": [value for _, value in known], "codes": codes}


def rows_of(run: dict[str, Any], metric: str, wanted=lambda row: True) -> list[dict[str, Any]]:
    """Rows of a metric that are wanted, as mappings of their columns and settings."""
    columns, values = run["rows"]["columns"], run["rows"]
    if metric not in columns["metric"]["values"]:
        return []
    code = columns["metric"]["values"].index(metric)
    rows = (
        {name: column["values"][column["codes"][i]] for name, column in columns.items()}
        | {name: values[name][i] for name in NUMBERS}
        for i, one in enumerate(columns["metric"]["codes"])
        if one == code
    )
    return [row for row in rows if wanted(row)]
