"""Page of a run: its notebook as stored, under a header with its status."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any
from xml.parsers import expat

from workbook.runs import looks, metrics, report
from workbook.runs.loaded import TRIAL

HERE = Path(__file__).parent
FENCE = "`" * 12
TAIL = 4000  # characters of a log that are shown if there is no notebook


@lru_cache(maxsize=1)
def templates():
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["slug"] = lambda text: re.sub(r"\W+", "-", str(text))
    made.filters["when"] = when
    made.filters["lasted"] = report.lasted
    made.filters["tokens"] = looks.length
    made.filters["first"] = first_sentence
    # a run on a newcomer's CPU does not stand before one on a GPU
    made.filters["on_gpu"] = lambda runs: sorted(
        runs, key=lambda run: not any(map(metrics.is_gpu, run["device"]))
    )
    made.globals["fence"] = FENCE
    return made


def when(text: Any) -> str:
    return str(text or "")[:16].replace("T", " ")


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.?!])\s", text.strip(), maxsplit=1)[0]


def html(name: str, **values: Any) -> str:
    return templates().get_template(name).render(**values)


def run_page(folder: Path, run: dict[str, Any]) -> str:
    """Notebook of a run's page, as JSON: title, header, cells with folded code, trials."""
    notebook, cells = folder / "notebook.ipynb", []
    try:
        content = json.loads(notebook.read_text(encoding="utf-8"))
        cells = [made for cell in content["cells"] if (made := _cell(cell, folder))]
    except FileNotFoundError:
        run["damaged"].append("there is no notebook.ipynb")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        run["damaged"].append(f"notebook.ipynb cannot be read: {error}")
    name, _, _ = str(run["notebook"]).partition(".")
    title = f"# {name}, {when(run['started'])}"
    if cells and cells[0]["cell_type"] == "markdown":
        found = re.match(r"\s*# +(.+)\n?", cells[0]["source"])
        if found:
            title = f"# {run['parameters'].get('question') or found[1].strip()}"
            cells[0]["source"] = cells[0]["source"][found.end() :]
    trials = {p.parent.name: _text(p) for p in sorted(folder.glob("trials/*/explain.txt"))}
    logs = {} if cells else {n: _text(folder / n)[-TAIL:] for n in ("stdout.log", "stderr.log")}
    files = sorted(p.name for p in folder.iterdir() if p.suffix in FILES)
    values = {"run": run, "trials": trials, "logs": logs, "files": files, "linked": _linked}
    values["answer"] = report.answer(run["status"], run["verdicts"], run.get("message") or "")
    top = f"{title}\n\n{html('run.html.j2', **values)}"
    cells.insert(0, _markdown(top))
    if trials:
        cells.append(_markdown(f"## Trials\n\n{html('trials.html.j2', trials=trials)}"))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


FILES = (".csv", ".json", ".yaml", ".log")


def _markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _linked(claim: str, trials: dict[str, str]):
    """Link the trials of a claim to their pages below."""
    from markupsafe import Markup, escape

    def link(found: re.Match) -> str:
        id = found[0]
        return f'<a href="#trial-{id}">{id}</a>' if id in trials else id

    return Markup(TRIAL.sub(link, str(escape(claim))))


def _cell(cell: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Cell as the site shows it: code folded unless it failed, figures as SVG with alt texts."""
    source, metadata = "".join(cell.get("source", "")), cell.get("metadata", {})
    tags = set(metadata.get("tags", []))
    if "papermill-error-cell-tag" in tags or not source.strip():
        return None
    if cell["cell_type"] != "code":
        # a run's page lies one folder deeper than its notebook did
        source = source.replace("](../docs/", "](../../docs/")
        return _markdown(source) if cell["cell_type"] == "markdown" else None
    outputs = cell.get("outputs", [])
    status = (metadata.get("papermill") or {}).get("status", "")
    failed = status == "failed" or any(o["output_type"] == "error" for o in outputs)
    words = re.findall(r"""["'](\w[\w.-]*)["']""", source)
    figures = [word for word in words if list((folder / "figures").glob(f"{word}.[ps][nv]g"))]
    shown, alts = [], []
    for output in outputs:
        data = output.get("data", {})
        if "application/vnd.jupyter.widget-view+json" in data:
            data = {"text/markdown": "*An interactive widget stood here; its notebook has it.*"}
        elif "image/png" in data or "image/svg+xml" in data:
            name = figures.pop(0) if figures else ""
            data, alt = _figure(data, name, folder)
            alts.append(alt)
        elif output.get("name") == "stderr" and not failed:
            text = "".join(output.get("text", ""))
            data = {"text/html": html("progress.html.j2", text=text, lines=text.count("\n") or 1)}
        if data:
            metadata = output.get("metadata", {})
            output = {"output_type": "display_data", "data": data, "metadata": metadata}
        shown.append(output)
    made = {"tags": [] if failed else ["hide-input"]}
    if alts:
        made["mystnb"] = {"image": {"alt": " ".join(alts)}}
    return {
        "cell_type": "code",
        "source": source,
        "metadata": made,
        "outputs": shown,
        "execution_count": cell.get("execution_count"),
    }


def _figure(data: dict[str, Any], name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Output of a figure with the SVG that the run keeps, else unchanged; and its alt text."""
    svg = "".join(data.get("image/svg+xml", ""))
    file = folder / "figures" / f"{name}.svg"
    if name and file.is_file():
        svg = file.read_text(encoding="utf-8")
    if svg:
        return {"image/svg+xml": svg}, alternative(svg, name)
    words = name.replace("_", " ") or "of this cell"
    return {"image/png": data["image/png"]}, f"Figure {words}; how to read it stands below it."


def alternative(svg: str, name: str = "") -> str:
    """Alt text of an SVG of matplotlib: its title, axes and series.

    matplotlib writes each text as a comment of the group that it is in.
    """
    found: dict[str, list[str]] = {"title": [], "across": [], "up": [], "series": []}
    path: list[str] = []  # ids of the open elements

    def comment(told: str) -> None:
        kind = _kind(path[1:])
        if path and kind and (text := _plain(told)) not in found[kind]:
            found[kind].append(text)

    parser = expat.ParserCreate(namespace_separator="}")  # a tree would take twice as long
    parser.StartElementHandler = lambda tag, given: path.append(given.get("id", ""))
    parser.EndElementHandler = lambda tag: path.pop()
    parser.CommentHandler = comment
    try:
        parser.Parse(svg, True)
    except expat.ExpatError:
        return f"Figure {name.replace('_', ' ')}".strip()
    said = [f"Figure {name.replace('_', ' ')}".strip()]
    parts = {"title": "", "across": "across: ", "up": "up: ", "series": "shown: "}
    for kind, word in parts.items():
        texts = [text for text in found[kind] if text]
        if kind == "title":  # numbers are labels of points
            texts = [text for text in texts if re.search(r"[^\W\d]{2}", text)]
        said += [word + ", ".join(texts[:8])] if texts else []
    return "; ".join(said) + "."


def _kind(path: list[str]) -> str:
    """Kind of a text, by its groups: axes are numbered, with odd numbers for those across."""
    groups = " ".join(path)
    if "tick_" in groups:
        return ""
    if axis := re.search(r"matplotlib\.axis_(\d+)", groups):
        return "across" if int(axis[1]) % 2 else "up"
    return "series" if "legend_" in groups else "title"


def _plain(text: str) -> str:
    r"""`$\mathdefault{10^{0}}$` and the like without TeX."""
    return re.sub(r"\\mathdefault|[${}]", "", " ".join(text.split()))
