"""`nsa site`: sources of all pages, written if they changed, and Sphinx over them."""

import contextlib
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
    with _alone(to / WORK):
        work = _unpacked(to / WORK)
        source = work / "source"
        found = list(folders) if folders is not None else _folders(root)
        runs, written = [], 0
        with ThreadPoolExecutor(1) as aside:  # git counts on another core; `age` keeps the counts
            for folder in found:
                runs.append(run := data.collect(folder, root, work / "runs"))
                aside.submit(_aged, run)
                written += _run(run, folder, source, to)
                say(f"{len(runs)} of {len(found)} runs read, {written} of them new or changed")
        runs = sorted(runs, key=lambda run: str(run["started"]))[::-1]
        names = _docs(Path(docs), source / "docs", {run["run"] for run in runs})
        _tables(runs, names, source)
        _forget({run["run"] for run in runs}, names, source, to, work)
        warnings: tuple[str, ...] = ()
        old = _text(work / "made") != data.digest(_sources(source, to))
        if old:
            warnings = _sphinx(source, to, work, say)
            _write(work / "made", data.digest(_sources(source, to)))
        _pack(to / WORK, changed=old or written > 0)
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


def _unpacked(home: Path) -> Path:
    """Folder with what the last build left, unpacked; empty if that was none or is damaged.

    One that a build left open, because it failed or was ended, is newer than the packed one.
    """
    for path in home.iterdir():
        if path.is_dir() and path.name != OPEN:
            shutil.rmtree(path)
        elif path.is_file() and path.name not in (KEPT, "lock"):
            path.unlink()
    if not (home / OPEN).is_dir():
        part = home / "part"
        try:
            with tarfile.open(home / KEPT) as packed:
                packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
                packed.extractall(part)
        except (OSError, EOFError, tarfile.TarError, zlib.error):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        part.rename(home / OPEN)
    return home / OPEN


def _pack(home: Path, changed: bool) -> None:
    """Pack what the build leaves, if it `changed` since it was unpacked, and remove it."""
    if changed or not (home / KEPT).is_file():
        with tarfile.open(home / "new", "w:gz", compresslevel=1) as packed:
            packed.add(home / OPEN, arcname=".")
        (home / "new").replace(home / KEPT)
    gone = (home / OPEN).rename(home / "gone")  # a half removed one must not be taken for whole
    shutil.rmtree(gone)


def _sources(source: Path, to: Path) -> list[Path]:
    """Files that pages are made of, and the front page, which may have been removed."""
    ours = [path for path in HERE.rglob("*") if path.suffix in (".py", ".css", ".js")]
    return [*ours, *source.rglob("*.md"), *source.rglob("*.ipynb"), to / "index.html"]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _write(path: Path, text: str) -> bool:
    """Write a file if its text changed; an unchanged one keeps its date, which Sphinx compares.
    A half written one is written again by the next build: nothing has signed it."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def _run(run: dict, folder: Path, source: Path, to: Path) -> bool:
    """Write a run's page, the data that comparisons load, its files; False if up to date."""
    page = source / "runs" / f"{run['run']}.ipynb"
    signed = page.with_suffix(".signature")
    said = f"{run['signature']} {run['status']}"
    script = to / "data" / f"{run['run'].replace('/', '__')}.js"
    if signed.is_file() and signed.read_text() == said and page.is_file() and script.is_file():
        return False
    _write(page, pages.run_page(folder, run))
    told = json.dumps({k: v for k, v in run.items() if k not in ("signature", "verdicts")})
    name = json.dumps(run["run"])
    _write(script, f"(window.nsaRuns = window.nsaRuns || {{}})[{name}] = {told};\n")
    files = to / "files" / run["run"]
    files.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in pages.FILES and path.is_file():
            shutil.copyfile(path, files / path.name)
    _write(signed, said)
    return True


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


def _forget(runs: set[str], docs: list[str], source: Path, to: Path, work: Path) -> None:
    """Remove pages of runs and documents that no longer exist."""
    for page in source.glob("runs/*/*.ipynb"):
        name = page.relative_to(source / "runs").with_suffix("").as_posix()
        if name not in runs:
            flat = name.replace("/", "__")
            page.with_suffix(".signature").unlink(missing_ok=True)
            for path in (page, to / "runs" / f"{name}.html", to / "data" / f"{flat}.js",
                         work / "runs" / f"{flat}.json"):  # fmt: skip
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
