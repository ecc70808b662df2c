"""Numbers of the documents, each bound to what it was taken from: docs/numbers.yaml.

An entry has `text`, a piece of its document with `{}` for each number, which stands there once or
first `after` another piece; or `from` and `to`, between which all numbers are. Where they are from:

    run      a folder of runs/, for its metrics.csv; with /rows, for the JSON rows of a training;
             or a file of rows as JSON lines. `where`: columns and settings that one row alone
             has; `each`: the same for each number, beside `where`
    says     a piece of a claim of that run with `{}` for numbers, of which those at `take` are
             shown; `only`: of the claims with this expression; `again`: of those that a function
             of workbook.rooms makes of its rows today
    prints   a piece of what the run's notebook printed, likewise
    stated   why no run has them: a public figure, an aim, a script's

`where` and `each` may have `run`, `column` (median; with dots a path in a JSON row, which begins
`below` another), `scale` (1), `over` and `less` (divided by another row, or that taken off),
`least`, `most` or `mean` (of several rows). A number holds where its run's value rounds to the
digits that are shown.
"""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from places import ROOT

from workbook.rooms.quality import trials
from workbook.runs import measured, metrics

BINDINGS = ROOT / "docs/numbers.yaml"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = r"ms|us|s\b|GiB|MiB|KiB|KB|MB|%|tokens/s|TFLOP/s|TB/s|times|bytes"
# What measures nothing: a length, a size, a version, a date, a name.
NAMED = re.compile(
    r"(?:\b(?:T|HQ|HKV|G|D|DV|n|w|l|d|l'|seed|step|steps|torch|Triton|Python|Eq\.|fla-core|phase|"
    r"version|notebook|from|ranks?|sm_|arXiv|rows?|[0-9]{2}_\w+)\s*|[A-Za-z_^/-])$"
)
OF_SEVERAL = {"least": min, "most": max, "mean": fmean}
SPEAKS = ("run", "column", "below", "scale", "over", "less", *OF_SEVERAL)


@dataclass(frozen=True)
class Shown:
    """A number as a document shows it, and where it stands there."""

    text: str
    begin: int

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    @property
    def half(self) -> float:
        """Half of the last digit that is shown; zeros at the end of a whole number show none."""
        whole, _, decimals = self.text.replace(",", "").partition(".")
        zeros = len(whole) - len(whole.rstrip("0")) if whole.strip("0") else 0
        return 0.5 * 10.0 ** (-len(decimals) if decimals else zeros)

    def is_of(self, value: float) -> bool:
        return abs(value - self.value) <= self.half * (1 + 1e-9)


def pattern(text: str) -> str:
    """A piece of text as an expression: any space for a space, a number for `{}`."""
    parts = [re.escape(part) for part in text.strip().split("{}")]
    return re.sub(r"(?:\\\s|\s)+", r"\\s+", f"({NUMBER})".join(parts))


@dataclass(frozen=True)
class Binding:
    """One entry of numbers.yaml."""

    document: str
    entry: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.document}: {self.entry.get('text') or self.entry['from']}"

    def span(self) -> tuple[int, int]:
        """Place of its text, or of its sections. ValueError unless that is one."""
        text = read(self.document)
        if "from" in self.entry:
            begin = text.index(self.entry["from"])
            end = text.find(self.entry["to"], begin + 1) if self.entry.get("to") else len(text)
            if end < 0:
                raise ValueError(f"{self.name}: no {self.entry['to']!r} after it")
            return begin, end
        after = self.entry.get("after", "")
        begin = text.index(after)
        found = list(re.compile(pattern(self.entry["text"])).finditer(text, begin))
        if not found or (len(found) > 1 and not after):
            raise ValueError(f"{self.name}: stands there {len(found)} times, not once")
        return found[0].span()

    def shown(self) -> list[Shown]:
        begin, end = self.span()
        text = read(self.document)
        if "from" in self.entry:
            return [one for one in numbers(self.document) if begin <= one.begin < end]
        match = re.compile(pattern(self.entry["text"])).match(text, begin)
        return [Shown(match[i], match.start(i)) for i in range(1, len(match.groups()) + 1)]

    def values(self) -> list[float]:
        """Numbers that its source has, in order."""
        one = self.entry
        if "says" in one or "prints" in one:
            texts = printed(one["run"]) if "prints" in one else claims(one["run"], one.get("again"))
            texts = [text for text in texts if re.search(one.get("only", ""), text)]
            told = once(texts, one.get("says") or one["prints"], one["run"])
            return [told[i] for i in one.get("take", range(len(told)))]
        common = {key: one[key] for key in SPEAKS if key in one} | one.get("where", {})
        return [value(common | each) for each in one.get("each", [{}])]


def value(asked: dict[str, Any]) -> float:
    """The number of the one row that has what is asked, or of the least, the most or the mean of
    several."""
    asked = dict(asked)
    run, column, scale = asked.pop("run"), asked.pop("column", "median"), asked.pop("scale", 1)
    over, less = (asked.pop(key, None) for key in ("over", "less"))
    several = [how for name, how in OF_SEVERAL.items() if asked.pop(name, False)]
    if below := asked.pop("below", ""):
        column = f"{below}.{column}"
    found = [row for row in rows(run) if all(row.get(key) == v for key, v in asked.items())]
    numbers = [float(one) for row in found if (one := within(row, column)) not in ("", None)]
    if not numbers or (len(numbers) > 1 and not several):
        raise ValueError(f"{run}: {len(numbers)} rows have {asked}")
    [how] = several or [min]
    other = {"run": run, "column": column} | asked
    taken = how(numbers) - (value(other | less) if less else 0)
    return scale * taken / (value(other | over) if over else 1)


def within(row: Any, path: str) -> Any:
    """Value at a path as tasks.needle.0; None if nothing stands there."""
    for step in path.split("."):
        row = row.get(step) if isinstance(row, dict) else row[int(step)]
        if row is None:
            return None
    return row


@cache
def rows(run: str) -> list[dict[str, Any]]:
    """metrics.csv, with the settings of each row beside its columns and x_value as a number; or
    the rows of trainings, with the settings of their cell beside them."""
    if run.endswith("/rows"):
        trained = trials.of_run(folder(run.removesuffix("/rows")))
        return [row["cell"] | row for row in trained]
    if run.endswith(".jsonl"):
        return [row["cell"] | row for row in measured.read([str(folder(run))])]
    with (folder(run) / "metrics.csv").open() as file:
        found = [json.loads(row["config"]) | row for row in csv.DictReader(file)]
    return [row | {"x_value": float(row["x_value"] or "nan")} for row in found]


@cache
def folder(run: str) -> Path:
    [found] = (ROOT / "runs").glob(f"*/{run}")
    return found


def once(texts: list[str], piece: str, run: str) -> list[float]:
    """The numbers in the one of those texts that has such a piece."""
    found = [match for text in texts if (match := re.search(pattern(piece), text))]
    if len(found) != 1:
        raise ValueError(f"{run}: {len(found)} texts have {piece!r}, not one")
    return [float(text.replace(",", "")) for text in found[0].groups()]


def claims(run: str, again: str | None) -> list[str]:
    if again:
        return read_again(run, again)
    return [entry["claim"] for entry in json.loads((folder(run) / "verdicts.json").read_text())]


@cache
def read_again(run: str, asked: str) -> list[str]:
    """Call a function of workbook.rooms, "throughput.claims:aims", on the run's rows."""
    module, name = asked.split(":")
    rows = metrics.read(folder(run) / "metrics.csv")
    made = getattr(import_module(f"workbook.rooms.{module}"), name)(rows)
    return [one.claim for one in (made if isinstance(made, list) else [made])]


def printed(run: str) -> list[str]:
    cells = json.loads((folder(run) / "notebook.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return ["".join(text) for text in texts]


@cache
def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def bindings() -> list[Binding]:
    given = yaml.safe_load(BINDINGS.read_text(encoding="utf-8"))
    return [Binding(document, entry) for document, one in given.items() for entry in one]


def numbers(document: str) -> Iterator[Shown]:
    """Measured numbers of a document: in a table's cells but the first, with a unit, decimals or
    thousands; none in code, in a link's address, or that name a length, a size or a version."""
    text = read(document)
    blank = re.sub(
        r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>", lambda m: "." * len(m[0]), text, flags=re.S
    )
    for match in re.finditer(rf"(?<![\w.,-]){NUMBER}(?![\w.]*[A-Za-z_])", blank):
        line = blank.rfind("\n", 0, match.start()) + 1
        before, after = blank[line : match.start()], blank[match.end() : match.end() + 12]
        in_cell = before.startswith("|") and before.count("|") > 1
        unit = re.match(rf"[\s-]?(?:{UNIT})", after)
        telling = unit or "." in match[0] or "," in match[0] or in_cell
        if telling and (unit or not NAMED.search(before)) and not before.startswith("#"):
            yield Shown(match[0], match.start())


def coverage(document: str) -> dict[str, list[Shown]]:
    """The numbers of a document: bound to a run, stated, or neither."""
    bound, stated = set(), set()
    for one in bindings():
        if one.document == document:
            into = stated if "stated" in one.entry else bound
            into |= {shown.begin for shown in one.shown()}
    found: dict[str, list[Shown]] = {"bound": [], "stated": [], "open": []}
    for shown in numbers(document):
        kind = "bound" if shown.begin in bound else "stated" if shown.begin in stated else "open"
        found[kind].append(shown)
    return found
