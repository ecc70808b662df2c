"""Report page of one training: its settings, loss curve, warnings, and how to continue."""

import base64
import csv
import io
import json
import math
import shlex
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from workbook.runs import looks, report, timeline
from workbook.runs.files import read_json
from workbook.runs.record import load

MOST = 400  # points of a curve; if there are more, neighbours are averaged
HOW_TO_READ = (
    "From left to right the allocator's events of one step, dashed lines where phases begin. What "
    "stays at one height was there before; activations grow in the forward and shrink in the "
    "backward while gradients grow; the point is the peak, which the table below takes apart."
)
FINDINGS = {"warning": "warning", "refused": "went on all the same"}


def render(folder: str | Path) -> Path:
    """Write report.html into a training run's folder; return its path. Parts that an interrupted
    run lacks are left out."""
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    folder = Path(folder)
    shown = [new_output("display_data", {"text/html": html}) for html in _parts(folder)]
    return report.render(folder, new_notebook(cells=[new_code_cell("", outputs=shown)]))


def _parts(folder: Path):
    record, job = load(folder), read_json(folder / "job.json", {})
    result = record.get("result") or read_json(folder / "result.json", {})
    model, train = job.get("model", {}), job.get("train", {})
    layers = model.get("layers")
    name = f"{model.get('name')}, {layers} layer{'s' * (layers != 1)}, T = {train.get('tokens')}"
    yield f"<h1>Training: {escape(name)}</h1>"
    yield _table(_findings(folder, result))
    if failure := record.get("first_failure"):
        yield "<h2>What failed</h2>" + _text(failure.get("traceback") or failure.get("message"))
    if advice := result.get("stop", {}).get("advice"):
        yield "<h2>What to try</h2>" + _list(advice)
    yield "<h2>Loss</h2>" + _curves(folder)
    if warned := [*_warnings(folder, result)]:
        yield "<h2>Warnings</h2>" + _list(warned)
    if (profile := folder / "profile.txt").is_file():
        yield "<h2>Profile</h2>" + _text(profile.read_text(encoding="utf-8"))
    if memory := [*_memory(folder)]:
        yield "<h2>Memory of one step</h2>" + "".join(memory)
    yield "<h2>The job</h2>" + _text("nsa " + shlex.join(job.get("argv") or ["train"]))
    settings = [(k, json.dumps(v)) for k, v in _flat({"model": model, "train": train})]
    yield f"<details><summary>All settings</summary>{_table(settings)}</details>"
    if str(result.get("weights", "")).startswith("checkpoints/"):
        place = Path(*folder.resolve().parts[-3:])
        yield "<h2>Go on with its weights</h2>" + _text(
            f'model = nsa.load_model("{place}")\n'
            f"nsa train ... --steps {2 * result['steps']} --resume {place}"
        )


def _findings(folder: Path, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Findings of the run in words; for one that was cut short, from its losses."""
    rows = _rows(folder / "losses.csv")
    found = [("steps", str(result.get("steps", len(rows))))]
    if rows:
        found.append(
            ("loss, nats a token", f"{rows[0][1]:.4f} at first, {rows[-1][1]:.4f} at last")
        )
    if evaluated := _rows(folder / "evaluations.csv"):
        found.append(("held out", f"{evaluated[-1][1]:.4f} after {evaluated[-1][0]:.0f} steps"))
    found += [(what, str(result[key])) for what, key in (("speed", "speed"), ("data", "loader"))
              if result.get(key)]  # fmt: skip
    attention = result.get("attention", {})
    if used := attention.get("backends"):
        found.append(("attention", ", ".join(f"{name} ({n} calls)" for name, n in used.items())))
    declined = attention.get("declined", {}).items()
    found += [(f"{name} declined", "; ".join(reasons)) for name, reasons in declined]
    for what, key in (("skipped", "skipped_steps"), ("left out", "left_out_steps")):
        if result.get(key):
            found.append((f"{what} steps", str(result[key])))
    if result.get("weights"):
        found.append(("weights", result["weights"]))
    return found


def _warnings(folder: Path, result: dict[str, Any]):
    for finding in read_json(folder / "preflight.json", {}).get("findings", []):
        if finding.get("state") in FINDINGS:
            yield f"before the first step, {FINDINGS[finding['state']]}: {finding['text']}"
    for key in ("warnings", "stalls"):
        for one in result.get(key) or []:
            text = one if isinstance(one, str) else one.get("message") or one.get("headline")
            yield text or json.dumps(one)


def _curves(folder: Path) -> str:
    """Plot loss and gradient norm against steps, with losses on held-out batches."""
    rows, evaluated = _rows(folder / "losses.csv"), _rows(folder / "evaluations.csv")
    if not rows:
        return "<p>No step was finished, or its loss was never read.</p>"
    with looks.figure(2, 3.0) as (fig, (left, right)):
        steps, losses, norms = zip(*_thinned(rows), strict=True)
        left.plot(steps, losses, color=looks.PALETTE[0], label="loss of each batch")
        if evaluated:
            at, held_out = zip(*evaluated, strict=True)
            left.plot(at, held_out, "o", color=looks.PALETTE[5], label="held out")
        right.plot(steps, norms, color=looks.PALETTE[2], label="gradient norm before clipping")
        right.set_yscale("log")
        for axes, unit in ((left, "nats a token"), (right, "norm")):
            axes.set(xlabel="step", ylabel=unit)
        if len(rows) > MOST:
            looks.title(left, "Loss", f"means of about {math.ceil(len(rows) / MOST)} steps")
    bad = sum(not math.isfinite(norm) for _, _, norm in rows)
    said = f"Loss from {rows[0][1]:.4f} to {rows[-1][1]:.4f} nats over {len(rows)} steps"
    said += f"; {bad} steps whose gradient norm is not finite have no point" * bool(bad)
    return _image(fig, said) + f"<p>{said}.</p>"


def _memory(folder: Path):
    """Yield a step's memory as picture and text, for each rank that recorded one."""
    for page in sorted(folder.glob("memory-rank*.txt")):
        told = page.read_text(encoding="utf-8")
        if (record := page.with_suffix(".json")).is_file():
            said = "What the step holds by category, from its first allocation to its last"
            yield _image(timeline.of_record(record), said) + f"<p>{HOW_TO_READ}</p>"
        yield _text(told)


def _image(fig, said: str) -> str:
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    with looks.style():
        fig.savefig(file, format="svg", metadata={"Date": None})
    plt.close(fig)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{said}" src="data:image/svg+xml;base64,{data}">'


def _thinned(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Average neighbours so that at most MOST rows are left."""
    size = math.ceil(len(rows) / MOST)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [tuple(fmean(column) for column in zip(*part, strict=True)) for part in parts]


def _rows(file: Path) -> list[tuple[float, ...]]:
    """Read a table of numbers without its header; [] if there is none."""
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return [tuple(map(float, row)) for row in [*csv.reader(lines)][1:]]


def _flat(values: dict[str, Any], prefix: str = ""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in rows)
    return f'<table class="facts">{"".join(cells)}</table>'


def _list(items) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
