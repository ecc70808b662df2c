"""A run as one self-contained HTML file, its figures in one folder, a page of all runs."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbook.runs import environment, parameters, store
from workbook.runs.files import read_json, write_atomically, write_json
from workbook.runs.record import load, status_now

TEMPLATES = Path(__file__).with_name("templates")
SHOWN = {"report.html": "report", "notebook.ipynb": "notebook", "figures": "figures",
         "metrics.csv": "numbers", "stderr.log": "log"}  # fmt: skip
MOST_FIGURES = 3  # above the notebook
REMOTE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)


def publish_figures(folder: Path, root: Path, figures: Path) -> None:
    """Copy a run's PNG and SVG figures to `figures`, each beside a JSON that names the run.
    `folder` is the run's, below `root`. OSError if `figures` cannot be written."""
    sources = sorted(p for p in (folder / "figures").glob("*") if p.suffix in (".png", ".svg"))
    if not sources:
        return
    record = load(folder)
    notebook = record["notebook"]
    of_run = {"run": folder.relative_to(root).as_posix(), "date": record["started"]}
    of_run |= environment.provenance(read_json(folder / "environment.json", {}))
    of_run["device"] = store.Run(folder).devices()
    figures.mkdir(parents=True, exist_ok=True)
    for source in sources:
        copy = write_atomically(figures / f"{notebook}--{source.name}", source.read_bytes())
        origin = {"figure": source.stem, "notebook": notebook, **of_run}
        write_json(copy.with_suffix(".json"), origin)


def render(source: str | Path, content: Any = None) -> Path:
    """Write `report.html` into a run folder, or `<name>.html` beside a notebook; returns its path.

    Code is folded, images are inside, links to the network are turned into plain text. `content`:
    content of a run that was no notebook. ValueError if there is no notebook to show.
    """
    import nbformat
    from nbconvert.exporters import HTMLExporter

    source = Path(source)
    folder = source if source.is_dir() else source.parent
    notebook = source / "notebook.ipynb" if source.is_dir() else source
    target = folder / "report.html" if source.is_dir() else source.with_suffix(".html")
    if content is None:
        if not notebook.is_file():
            raise ValueError(f"{source} holds no notebook.ipynb; give a run's folder or a notebook")
        content = nbformat.read(notebook, as_version=4)
    marked = "papermill-error-cell-tag"  # the header and the open cell show it already
    content.cells = [c for c in content.cells if marked not in c.metadata.get("tags", [])]
    exporter = HTMLExporter(
        template_file="report.html.j2",
        extra_template_paths=[str(TEMPLATES)],
        exclude_anchor_links=True,
    )
    # widgets are left out; their saved state would only make the file large
    exporter.exclude_output_prompt = exporter.exclude_input_prompt = True
    html, _ = exporter.from_notebook_node(content, {"report": _header(folder, notebook)})
    return write_atomically(target, closed(html, notebook.parent))


def index(root: str | Path) -> Path:
    """Write `<root>/index.html`, newest run first."""
    import jinja2

    root = Path(root)
    rows = []
    for folder in reversed(store.Store(root).folders()):
        row = {k: "" if v is None else v for k, v in store.summary(folder, root).items()}
        row["started"] = _when(row)
        # a clone has no reports; what it has is linked
        there = [name for name in SHOWN if (folder / name).exists()]
        row["links"] = {SHOWN[name]: quote(f"{row['run']}/{name}") for name in there}
        rows.append(row)
    template = jinja2.Template((TEMPLATES / "index.html.j2").read_text(encoding="utf-8"))
    root.mkdir(parents=True, exist_ok=True)
    return write_atomically(root / "index.html", template.render(runs=rows, style=style()))


@lru_cache(maxsize=1)
def style() -> str:
    """Style sheet of the report, and the colours of highlighted code for light and for dark."""
    from pygments.formatters import HtmlFormatter

    own = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    plain = ".highlight, .highlight pre { background: var(--panel); }"
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{plain}\n{own}"


def _header(folder: Path, notebook: Path) -> dict:
    record = load(folder)
    run, took = record.get("run_id") or notebook.stem, lasted(record.get("seconds"))
    device = store.Run(folder).devices()
    header = {
        "figures": _figures(folder) if record else [],
        "title": f"{record.get('notebook') or notebook.stem} · {_when(record)}".strip(" ·"),
        "crumb": " · ".join(filter(None, [run, _when(record), took, device])),
        "status": "notebook",
        "tables": {},
        "footer": run,
        "style": style(),
    }
    if not record:
        return header
    facts, file = read_json(folder / "environment.json", {}), folder / "parameters.yaml"
    given = parameters.read_file(file) if file.is_file() else {}
    numbers = "losses.csv" if (folder / "losses.csv").is_file() else "metrics.csv"
    status, verdicts = status_now(record), read_json(folder / "verdicts.json", [])
    return header | {
        "status": status,
        "question": given.get("question") or record.get("question") or "",
        "answer": answer(status, verdicts, record.get("message") or ""),
        "message": record.get("message", ""),
        "verdicts": verdicts,
        "tables": ({"Parameters": list(given.items())} if given else {})
        | {"Environment": _environment(facts)},
        "footer": f"{run}. The numbers are in {numbers} beside this file.",
    }


def _figures(folder: Path) -> list[dict[str, str]]:
    """Up to MOST_FIGURES of a run's figures, the first it drew first, as addresses of data."""
    import base64

    kinds = {".svg": "image/svg+xml", ".png": "image/png"}
    files = [path for path in (folder / "figures").glob("*") if path.suffix in kinds]
    files.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    found = []
    for path in list({path.stem: path for path in files}.values())[:MOST_FIGURES]:
        content = base64.b64encode(path.read_bytes()).decode()
        data = f"data:{kinds[path.suffix]};base64,{content}"
        found.append({"name": path.stem.replace("_", " "), "data": data})
    return found


def answer(status: str, verdicts: list[dict], message: str = "") -> dict[str, str]:
    """Answer of a run in one line: its worst verdict, or a status other than ok, as `word`; the
    first claim with that verdict, or the message, and how many claims hold, as `text`."""
    worst = store.overall(verdicts)
    of = [str(v.get("claim", "")) for v in verdicts if v.get("verdict") == worst]
    passed = sum(v.get("verdict") == "PASS" for v in verdicts)
    counted = f"{passed} of {len(verdicts)} claims hold"
    if status not in ("ok", ""):
        text = "; ".join(filter(None, [message.rstrip("."), counted if verdicts else ""]))
        return {"word": status, "text": text or "it did not reach its end"}
    if not of:
        return {"word": worst or status, "text": message or "it reached its end and claims nothing"}
    claim = re.sub(r"\s*\[[^\]]*\]$", "", of[0])  # trials; the table has them
    return {"word": worst, "text": f"{claim}; {counted}" if len(verdicts) > 1 else claim}


def lasted(seconds: Any) -> str:
    """Duration in words: 45 s, 2.5 min; "" if not a number."""
    if not isinstance(seconds, int | float):
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _when(record: dict) -> str:
    return (record.get("started") or "").replace("T", " ").replace("+00:00", " UTC")


def _environment(facts: dict) -> list[tuple[str, Any]]:
    gpus = [
        "{name}, {memory_gib} GiB, compute {compute_capability}, driver {driver}".format(**g)
        for g in facts.get("gpus") or []
    ]
    git = facts.get("git") or {}
    commit = git.get("commit") or "not in a git repository"
    names = ("python", "platform", "cpu", "cpu_cores", "nsa", "torch", "cuda", "triton")
    names += ("flash_attn", "flash_attn_4", "seed", "date")
    rows = [("gpu", "; ".join(gpus) or "none")]
    rows += [(name, facts[name]) for name in names if facts.get(name) is not None]
    changes = f" and changes {git['dirty_hash'][:12]}" if git.get("dirty") else ""
    rows.append(("commit", commit + changes))
    return rows + list((facts.get("allocator", {}) | facts.get("variables", {})).items())


def closed(html: str, folder: Path) -> str:
    """Remove scripts and frames, embed pictures, and turn links to the network into text."""
    import base64
    import mimetypes

    from bs4 import BeautifulSoup

    page = BeautifulSoup(html, "html.parser")
    for tag in page.find_all(["script", "iframe", "object", "embed", "link", "base"]):
        tag.decompose()
    for tag in page.find_all("a", href=True):
        if not tag["href"].startswith("#"):
            address = re.sub(r"^(https?:)?//", "", tag["href"])
            tag.name, shown = "span", tag.get_text()
            tag.attrs = {}
            if address.strip("/") not in shown and not address.startswith("mailto:"):
                tag.append(f" ({address})")
    for tag in page.find_all(src=True):
        source = tag["src"]
        if source.startswith("data:"):
            continue
        file = folder / source
        kind = mimetypes.guess_type(source)[0] or ""
        if not REMOTE.match(source) and kind.startswith("image/") and file.is_file():
            data = base64.b64encode(file.read_bytes()).decode()
            tag["src"] = f"data:{kind};base64,{data}"
        else:
            tag.replace_with(f"[picture left out: {re.sub(r'^(https?:)?//', '', source)}]")
    for tag in page.find_all(True):
        for name in [n for n in tag.attrs if n.startswith("on") or n == "srcset"]:
            del tag[name]
    return str(page)
