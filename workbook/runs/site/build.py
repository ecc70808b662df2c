"""`nsa site`: sources of all pages, written if they changed, and Sphinx over them."""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from workbook.runs import age, environment, store
from workbook.runs.files import locked
from workbook.runs.site import answers, data, fits, pages

HERE = Path(__file__).parent
WORK = ".build"  # in the site's folder: a lock and, packed, the sources and Sphinx's cache
KEPT, OPEN = "cache.tar.gz", "open"  # in WORK; unpacked, they are as large as the site's pages
NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme")
RUN = re.compile(r"\]\((?:\.\./)?runs/(\d{4}-\d\d-\d\d/[\w.-]+)(?:/[\w./-]*)?\)")
ELSEWHERE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


@dataclass(frozen=True)
class Site:
    """Location of the site, number of its runs, and number of pages that were written anew."""

    index: Path
    runs: int
    written: int
    warnings: tuple[str, ...] = ()


def build(
    root: str | Path = "runs",
    to: str | Path = "site",
    *,
    folders: Iterable[Path] | None = None,
    docs: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Site:
    """Write the site of the runs below `root`, or of the given folders, into the folder `to`.

    Pages of runs whose files did not change stay as they are. `docs`: a folder of Markdown that is
    shown as well; by default the repository's. `say` is called with each step. ValueError if `root`
    is no folder, `to` contains something else, another build is running there, or Sphinx cannot be
    run.
    """
    root, to = Path(root), Path(to)
    if not root.is_dir():
        raise ValueError(f"{root} is no folder of runs; `nsa run` makes one, --runs names another")
    if to.is_dir() and any(to.iterdir()) and not (to / WORK).is_dir():
        raise ValueError(f"{to} holds files that no site has left there; name an empty folder")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{', '.join(missing)} is missing; pip install 'nsa[site]' brings it")
    if docs is None:  # beside an installed package `docs` could belong to anyone
        top = environment.PACKAGE.parent
        docs = top / "docs" if (top / "pyproject.toml").is_file() else to / WORK / "no docs"
    with _alone(to / WORK), _unpacked(to / WORK) as work:
        source = work / "source"
        found = list(folders) if folders is not None else _folders(root)
        runs, written = [], 0
        with ThreadPoolExecutor(1) as aside:  # git counts on another core; `age` keeps the counts
            for folder in found:
                runs.append(run := data.collect(folder, root))
                aside.submit(_aged, run)
                written += _run(run, folder, source, to)
                say(f"{len(runs)} of {len(found)} runs read, {written} of them new or changed")
        runs = sorted(runs, key=lambda run: str(run["started"]))[::-1]
        names = _docs(Path(docs), source / "docs", {run["run"] for run in runs})
        _tables(runs, names, source)
        _forget({run["run"] for run in runs}, names, source, to)
        warnings: tuple[str, ...] = ()
        if not (work / "made").is_file() or (work / "made").read_text() != _digest(source, to):
            warnings = _sphinx(source, to, work, say)
            _write(work / "made", _digest(source, to))
            _pack(to / WORK)
    return Site(to / "index.html", len(runs), written, warnings)


def _folders(root: Path) -> list[Path]:
    """Folders of runs with a record, or without one but with a notebook."""
    names = ("record.json", "notebook.ipynb")
    return sorted({path.parent for name in names for path in root.glob(f"*/*/{name}")})


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    try:
        work.mkdir(parents=True, exist_ok=True)
        (work / "lock").touch()
    except OSError as error:
        raise ValueError(
            f"cannot write to {work.parent} ({error.strerror}); name another: --to"
        ) from None
    with locked(work / "lock") as mine:
        if mine is None:
            raise ValueError(f"another `nsa site` is at work in {work.parent}; wait for it")
        yield


@contextlib.contextmanager
def _unpacked(home: Path) -> Iterator[Path]:
    """Folder with what the last build left, unpacked until the end; empty if that was none, did not
    reach its end, or is damaged."""
    work = home / OPEN
    if work.is_dir():  # its pages may be newer than what was packed before
        (home / KEPT).unlink(missing_ok=True)
    _only_packed(home)
    try:
        with tarfile.open(home / KEPT) as packed:
            packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            packed.extractall(work)
    except (OSError, EOFError, tarfile.TarError, zlib.error):
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(exist_ok=True)
    yield work
    _only_packed(home)


def _only_packed(home: Path) -> None:
    for path in home.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (KEPT, "lock"):
            path.unlink()


def _pack(home: Path) -> None:
    with tarfile.open(home / "new", "w:gz", compresslevel=1) as packed:
        packed.add(home / OPEN, arcname=".")
    (home / "new").replace(home / KEPT)


def _digest(source: Path, to: Path) -> str:
    """Hash of the files that pages are made of, and of the front page, which may have been removed;
    packing does not keep dates to the nanosecond."""
    ours = [path for path in HERE.rglob("*") if path.suffix in (".py", ".css", ".js")]
    made, told = (*source.rglob("*.md"), *source.rglob("*.ipynb")), hashlib.sha256()
    for path in sorted([*ours, *made, to / "index.html"]):
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
        told.update(f"{path} {held}\0".encode())
    return told.hexdigest()


def _write(path: Path, text: str) -> bool:
    """Write a file if its text changed; an unchanged one keeps its date, which Sphinx compares."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def _run(run: dict, folder: Path, source: Path, to: Path) -> bool:
    """Write a run's page, the data that comparisons load, its files; False if up to date."""
    changed = _write(source / "runs" / f"{run['run']}.ipynb", pages.run_page(folder, run))
    told = json.dumps({name: value for name, value in run.items() if name != "verdicts"})
    script = to / "data" / f"{run['run'].replace('/', '__')}.js"
    name = json.dumps(run["run"])
    changed |= _write(script, f"(window.nsaRuns = window.nsaRuns || {{}})[{name}] = {told};\n")
    files = to / "files" / run["run"]
    files.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in pages.FILES and path.is_file():
            shutil.copyfile(path, files / path.name)
    return changed


def _tables(runs: list[dict], docs: list[str], source: Path) -> None:
    """Write the front page, those of its answers, the tables of runs and of claims, comparisons."""
    books: dict[str, list[dict]] = {}
    for run in runs:
        counts = Counter(v["verdict"] for v in run["verdicts"])
        words = [*store.VERDICTS, *sorted(set(counts) - {*store.VERDICTS})]
        run["counts"] = {word: counts[word] for word in words if counts[word]}
        run["order"] = words.index(run["verdict"]) if run["verdict"] in words else len(words)
        run["age"] = _aged(run)
        books.setdefault(run["notebook"], []).append(run)
    books = dict(sorted(books.items()))
    for same in books.values():
        _set_apart(same)
    choices = {
        "notebook": list(books),
        "verdict": sorted({run["verdict"] or "none" for run in runs}),
        "GPU": sorted({device for run in runs for device in run["device"]}),
    }
    values = {"runs": runs, "books": books, "choices": choices, "docs": docs}
    values["words"] = age.WORDS
    for ask in (answers.speed, answers.training, answers.memory, answers.hung):
        values[ask.__name__] = ask(runs)
    values["fast"] = answers.front(values["speed"])
    values["trained"] = answers.front(values["training"], (values["fast"] or {}).get("device", ""))
    values["fits"] = fits.answer()
    values["commands"] = {s: fits.command(s, "layers kept", 8192, "--fits 80") for s in fits.SIZES}
    for name in ("index", "speed", "fits", "hung", "explorer", "runs", "claims", "compare"):
        _write(source / f"{name}.md", pages.html(f"{name}.md.j2", **values))


def _aged(run: dict) -> str:
    """Changes since a run's commit; NSA_COMMIT's if set, as in `StoredRun.commit`."""
    told = run["facts"].get("NSA_COMMIT") or run["commit"].partition("+")[0]
    since = age.since(str(told))
    if not since.known:
        return "unknown"
    return f"{since.commits} commits, +{since.added:,} -{since.removed:,} lines"


def _set_apart(runs: list[dict]) -> None:
    """For runs of one notebook, note in each, in words, the parameters unlike the others'."""
    names = {
        n: None for run in runs for n in run["parameters"] if n not in ("question", "predicts")
    }
    values = {name: [_said(run["parameters"].get(name)) for run in runs] for name in names}
    usual = {name: Counter(of).most_common(1)[0][0] for name, of in values.items()}
    for number, run in enumerate(runs):
        own = {name: of[number] for name, of in values.items() if of[number] != usual[name]}
        run["apart"] = ", ".join(f"{name} {value}" for name, value in list(own.items())[:3])


def _said(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 48 else text[:45] + "..."


def _docs(folder: Path, target: Path, runs: set[str]) -> list[str]:
    """Copy the documents, with links that lead to pages of the site or become text."""
    pages = {path.stem: path for path in sorted(folder.glob("*.md"))}
    if (hangs := folder.parent / "whyhung" / "README.md").is_file():
        pages["hangs"] = hangs
    figures = folder.parent / "figures"
    there = {f"{name}.md" for name in pages}
    for name, path in pages.items():
        text = path.read_text(encoding="utf-8")
        text = RUN.sub(lambda m: f"](../runs/{m[1]}.ipynb)" if m[1] in runs else m[0], text)

        def link(found: re.Match) -> str:
            address = found[2].partition("#")[0]
            known = address in there or address.startswith("../runs/")
            return found[0] if known and address.endswith((".md", ".ipynb")) else found[1]

        _write(target / f"{name}.md", ELSEWHERE.sub(link, text))
        for picture in re.findall(r"!\[[^\]]*\]\(\.\./figures/([\w.-]+)\)", text):
            if (figures / picture).is_file():
                copy = target.parent / "figures" / picture
                copy.parent.mkdir(parents=True, exist_ok=True)
                if not copy.is_file() or copy.read_bytes() != (figures / picture).read_bytes():
                    shutil.copyfile(figures / picture, copy)
    return list(pages)


def _forget(runs: set[str], docs: list[str], source: Path, to: Path) -> None:
    """Remove pages of runs and documents that no longer exist."""
    for page in source.glob("runs/*/*.ipynb"):
        name = page.relative_to(source / "runs").with_suffix("").as_posix()
        if name not in runs:
            script = to / "data" / f"{name.replace('/', '__')}.js"
            for path in (page, to / "runs" / f"{name}.html", script):
                path.unlink(missing_ok=True)
            shutil.rmtree(to / "files" / name, ignore_errors=True)
    for page in source.glob("docs/*.md"):
        if page.stem not in docs:
            page.unlink()
            (to / "docs" / f"{page.stem}.html").unlink(missing_ok=True)


STEP = re.compile(r"(reading sources|writing output)\.\.\. \[ *(\d+)%\]")


def _sphinx(source: Path, to: Path, work: Path, say: Callable[[str], None]) -> tuple[str, ...]:
    """Run Sphinx in its own process; return its warnings. ValueError with its output on failure."""
    jobs = (os.cpu_count() or 1) + 1  # one indexes words while the others write pages
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-j", str(jobs), "-c", str(HERE)]
    command += ["-d", str(work / "doctrees"), str(source), str(to)]
    places = [str(environment.PACKAGE.parent), os.environ.get("PYTHONPATH")]
    with_us = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places)), "NO_COLOR": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        say("Sphinx starts")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=with_us
        ) as sphinx:
            for line in sphinx.stdout:
                for step, percent in STEP.findall(line):
                    say(f"Sphinx, {step}: {percent} %")
        errors.seek(0)
        lines = [line.rstrip() for line in errors if line.strip()]
    for copy in (work / "pictures").rglob("*.ipynb"):  # myst-nb's, of which no page makes use
        copy.unlink()
    if sphinx.returncode:
        raise ValueError("Sphinx could not build the site: " + " / ".join(lines[-3:]))
    return tuple(line.replace(f"{source.resolve()}/", "") for line in lines)
