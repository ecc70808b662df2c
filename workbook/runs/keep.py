"""Committed parts of a run: its records, and the trials that its sentences name, made small."""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from whyhung.verdict import judge
from whyhung.verdict.explain import page
from whyhung.watch.evidence import Evidence, thinned
from whyhung.watch.flight_recorder import kept
from workbook.lab import sweep
from workbook.lab.search.ledger import Ledger
from workbook.runs import environment, identity, measured, metrics, parameters
from workbook.runs.files import (
    lighten,
    read_json,
    rounded_paths,
    tracked_files,
    write_atomically,
    write_json,
    write_notebook,
)
from workbook.runs.record import load

KIB = 1024
GOOD, MOST = 200 * KIB, 1024 * KIB  # bytes of a run's trials
LEAST, ENDS = 4 * KIB, 2 * KIB  # bytes of a trial's evidence, of a log's head and of its tail
TABLE = 128 * KIB  # bytes of a trial's table of measurements
LOST = 5  # number of names in a sentence
ID = re.compile(r"(?<![\w.])[0-9a-f]{12}(?:-\d+)?(?!\w)")
COLOUR = re.compile(r"(\x1b\[[\d;]*m)")  # of a terminal
# Files whose content evidence.json has as well, and hashes of files in the commit.
ELSEWHERE = ("evidence.json", "sources.json", "flight-*", "locks-*", "loaded-*", "stacks-*")
NOT_KEPT = ("report.html", "kernel.log", "trials")  # parts of a run


def keep(folder: str | Path) -> list[str]:
    """Make a run's trials small and add the run's evidence to git; returns lines to print.

    ValueError for a run that was not made with `--evidence`, whose source git cannot confirm to be
    its commit's, whose trials cannot be made small, or that names missing trials.
    """
    folder = Path(folder)
    if not load(folder).get("evidence"):
        raise ValueError(
            f"{folder.name} was not made from a clean commit: run it with `nsa run --evidence`"
        )
    check_source(folder)
    told = trials(folder)
    if lost := lost_ids(folder):
        raise ValueError(f"{folder.name} names {len(lost)} trials that are gone: {lost[:LOST]}")
    if (size := _size(folder)) > MOST:
        raise ValueError(f"its trials take {size / KIB:.0f} KiB; {MOST // KIB} are the most")
    if (notebook := folder / "notebook.ipynb").is_file():
        import nbformat

        small = lighten(nbformat.read(notebook, as_version=4))
        for cell in small.cells:
            for error in (x for x in cell.get("outputs", []) if x.output_type == "error"):
                error.traceback = [_plain_paths(line) for line in error.traceback]
        write_notebook(notebook, small)
    for picture in folder.glob("figures/*.svg"):
        write_atomically(picture, rounded_paths(picture.read_text(encoding="utf-8")))
    left = {*NOT_KEPT, measured.FILE} if _reads_tracked(folder) else NOT_KEPT
    files = [path for path in folder.iterdir() if path.name not in left and path.name[0] != "."]
    names = [path.relative_to(folder).as_posix() for path in (*files, *_kept(folder))]
    command = ["git", "-C", str(folder), "add", "--force", "--", *sorted(names)]
    done = subprocess.run(command, capture_output=True, text=True)
    why = (done.stderr.strip().splitlines() or ["no git"])[0]
    return [*told, f"not added to git: {why}" if done.returncode else f"added to git: {folder}"]


def _reads_tracked(folder: Path) -> bool:
    """Return True if the run's rows were read from files that git tracks, and need no copy."""
    place, top = folder / "parameters.yaml", environment.PACKAGE.parent
    rows = place.is_file() and parameters.read_file(place).get("rows")
    return bool(rows) and set(rows) <= set(tracked_files(top, "runs"))


def check_source(folder: Path, top: Path = environment.PACKAGE.parent) -> None:
    """Raise ValueError unless the source that ran equals git's at the run's commit: without the
    history, NSA_COMMIT had not been checked."""
    record = load(folder)
    commit = (read_json(folder / "environment.json", {}).get("git") or {}).get("commit") or ""
    there = identity.source_at(commit, str(record.get("notebook")), top)
    if there is None:
        raise ValueError(
            f"{folder.name} names commit {commit[:12] or 'unknown'}, which git does not know in "
            f"{top}, or which has no such notebook: fetch it, or run it again from a commit"
        )
    if record.get("source") != there:
        raise ValueError(
            f"{folder.name} ran source {record.get('source', 'of no known hash')}, and commit "
            f"{commit[:12]} is {there}: run it again from that commit's files, with NSA_COMMIT as "
            "`git rev-parse HEAD` says it where they are from"
        )


def trials(folder: Path) -> list[str]:
    """Copy the trials that a run's sentences name, as trials/<id>, those of a sweep's cells as
    trials/<name>: small, and without paths of this machine. Returns lines to print."""
    text, found = named_in(folder), {}
    words = f"-{sweep.plain(text)}-"
    for place in _places(folder, "trials/*/**"):
        name = re.sub(r"^\d{3}-", "", place.name)
        if place.parent != folder / "trials" and f"-{name}-" in words:
            found[name] = place
    for name, place in found.items():
        target = folder / "trials" / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        if (place / "verdict.json").is_file():
            _trial(place, target, max(LEAST, GOOD // len(found)))
        for path in sorted(place.iterdir()):
            _copy(path, target)
    size = _size(folder) / KIB
    return [f"{len(_kept(folder))} trials kept, {size:.0f} KiB"] if found else []


def _trial(place: Path, target: Path, most: int) -> None:
    """Write the evidence, reduced as needed without a change of verdict, and its page."""
    evidence, verdict = Ledger(place.parent).get(place.name)
    given = json.loads(without_paths(json.dumps(evidence.to_dict())))
    small = _smaller(Evidence.from_dict(given), most)
    write_atomically(target / "evidence.json.gz", _packed(small))
    write_json(target / "verdict.json", json.loads(without_paths(json.dumps(verdict.to_dict()))))
    text = page(small, verdict, name=place.name)
    write_atomically(target / "explain.txt", without_paths(text))


def _smaller(evidence: Evidence, most: int) -> Evidence:
    """Reduce to at most `most` bytes when packed, or as few as possible with the same verdict."""
    label, notes = judge(evidence).label, list(evidence.notes)
    before = len(evidence.samples), len(evidence.snapshots)
    left: list[Callable[[Evidence], Evidence]] = [
        lambda e: replace(e, flights={r: kept(f, 8) for r, f in e.flights.items()}),
        lambda e: replace(e, samples=thinned(e.samples)),
        lambda e: replace(e, snapshots=e.snapshots[:-2:2] + e.snapshots[-2:]),
        lambda e: replace(e, again=e.again and _smaller(e.again, most // 2)),
    ]
    while left and (size := len(_packed(evidence))) > most:
        less = left[0](evidence)
        if len(_packed(less)) < size and judge(less).label == label:
            evidence = less
        else:
            left.pop(0)
    after = len(evidence.samples), len(evidence.snapshots)
    if after != before:
        told = "kept small: {} of {} samples, {} of {} snapshots"
        notes.append(told.format(after[0], before[0], after[1], before[1]))
    return replace(evidence, notes=notes)


def _packed(evidence: Evidence) -> bytes:
    return gzip.compress(json.dumps(evidence.to_dict()).encode(), mtime=0)


def _copy(path: Path, target: Path) -> None:
    """Copy a file of a trial, unless it is empty, kept elsewhere, or large; a large log's ends."""
    if (target / path.name).exists() or any(path.match(name) for name in ELSEWHERE):
        return
    if not path.is_file() or not (size := path.stat().st_size):
        return
    content = path.read_bytes()
    if size > (TABLE if path.suffix == ".csv" else 2 * ENDS):
        if path.suffix not in (".txt", ".log"):
            return
        left_out = f"\n[{size - 2 * ENDS} bytes left out]\n".encode()
        content = content[:ENDS] + left_out + content[-ENDS:]
    if path.suffix != ".bin":
        content = without_paths(content.decode(errors="replace")).encode()
    write_atomically(target / path.name, content)


def without_paths(text: str) -> str:
    """Shorten paths to those in this project, in a package or in Python, else to two parts."""
    text = text.replace(f"{environment.PACKAGE.parent}/", "")
    text = re.sub(r"(?:/[\w.+@~-]+)*/(?:site|dist)-packages/", "/site-packages/", text)
    text = re.sub(r"(?:/[\w.+@~-]+)*/lib(?:64)?/python3", "/usr/lib/python3", text)
    known = "(?!(?:usr|proc|dev|sys|site-packages)/)"
    part = r"[\w.+@~-]+"
    return re.sub(
        rf"(?<![\w.<>/~-])~?/{known}(?:{part}/)*?({part}/{part})(?![\w/@~+-])", r"\1", text
    )


def _plain_paths(coloured: str) -> str:
    """Shorten the paths in a traceback's line, whose colours would hide where they begin."""
    parts = COLOUR.split(coloured)
    return "".join(text if k % 2 else without_paths(text) for k, text in enumerate(parts))


def named_in(folder: Path) -> str:
    """All texts of a run: its verdicts, what its notebook printed, and its rows' configs."""
    return "\n".join(_texts(folder))


def _texts(folder: Path) -> Iterator[str]:
    yield json.dumps(read_json(folder / "verdicts.json", []))
    yield from metrics.read(folder / "metrics.csv")["config"]
    for cell in read_json(folder / "notebook.ipynb", {}).get("cells", []):
        for output in cell.get("outputs", []):
            shown = [output.get("text", "")]
            shown += [v for k, v in output.get("data", {}).items() if k.startswith("text/")]
            yield from ("".join(text) for text in shown)


def lost_ids(folder: Path) -> list[str]:
    """Trials that a run names and that cannot be opened below its folder, nor are commits."""
    commits = {*metrics.read(folder / "metrics.csv")["commit"]}
    commits.add(str((read_json(folder / "environment.json", {}).get("git") or {}).get("commit")))
    judges = (entry.get("judged_again", {}) for entry in read_json(folder / "verdicts.json", []))
    commits |= {str(judge.get("commit")) for judge in judges}
    known = {commit[:12] for commit in commits}
    # One of only digits may be a number as well.
    named = {id for id in ID.findall(named_in(folder)) if not id.isdigit()} - known
    ledger = Ledger(folder / "trials")
    return sorted(id for id in named if ledger.get(id) is None)


def _kept(folder: Path) -> list[Path]:
    """Folders of the kept trials, directly below trials/; deeper ones are not kept."""
    return _places(folder, "trials/*")


def _places(folder: Path, pattern: str) -> list[Path]:
    """Folders of trials. Ranks of a trial have no spec of their own beside their launch's."""
    names = ("spec.json", "verdict.json")
    return sorted({file.parent for name in names for file in folder.glob(f"{pattern}/{name}")})


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for place in _kept(folder) for file in place.iterdir())
