"""Parts of a run to commit: small, without paths of this machine, to be explained again."""

import base64
import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from evidences import process, thread
from PIL import Image
from places import ROOT
from sample_notebooks import SET_UP, write_notebook
from verdict_cases import still

from whyhung.verdict import judge
from workbook.cli import main as cli
from workbook.lab.search.ledger import Ledger
from workbook.runs import environment, identity, keep, run
from workbook.runs.files import read_json, tracked_files, write_json
from workbook.runs.record import load

ID, OTHER, DIGITS = "0123456789ab", "ba9876543210", "123456789012"
GONE = "0f0f0f0f0f0f"
LOG = "first\n" + "x" * 100_000 + f"\nlast, in {Path.home()}/runs/a/b.py and {ROOT}/nsa/config.py\n"


def hung():
    """A hang, with many more samples than its verdict needs."""
    found = still(process(thread(wait=("lock", "waits for a lock", ((1, 1),)))))
    many = [replace(s, t=s.t + i / 100) for s in found.samples for i in range(12)]
    return replace(found, samples=many)


@pytest.fixture
def kept_run(tmp_path, monkeypatch):
    """A run whose verdict names two trials by their ids, and a sweep's cell."""
    monkeypatch.setattr(keep, "GOOD", 12 * keep.KIB)
    monkeypatch.setattr(keep, "check_source", lambda folder: None)  # has a test of its own
    folder = tmp_path / "runs" / "2026-12-01" / "03_step5-aaaaaaaa"
    ledger, evidence = Ledger(folder / "trials" / "step5"), hung()
    for id in (ID, OTHER, DIGITS):
        place = ledger.put(id, evidence, judge(evidence))
        (place / "spec.json").write_text(json.dumps({"folder": f"{Path.home()}/a/b/c"}))
        (place / "stdout.txt").write_text(LOG)
        (place / "core.bin").write_bytes(bytes(100_000))
        (place / "samples.csv").write_text("step,seconds\n" * 2000)
        (place / "large.csv").write_text("step,seconds\n" * 20_000)
        (place / "sources.json").write_text("{}")
    for name in ("000-print-schedule", "001-other-cell"):
        cell = folder / "trials" / "cells" / name
        cell.mkdir(parents=True)
        for file, text in (("spec.json", "{}"), ("result.json", "21"), ("stderr.txt", "")):
            (cell / file).write_text(text)
    evidence = [ID, f"{DIGITS} and print_schedule"]
    write_json(folder / "verdicts.json", [{"claim": "c", "verdict": "PASS", "evidence": evidence}])
    write_json(folder / "record.json", {"run_id": folder.name, "evidence": True})
    (folder / "report.html").write_text("large")
    return folder


def test_trials_that_a_run_names_are_kept_small_and_judged_the_same(kept_run):
    evidence, verdict = Ledger(kept_run / "trials" / "step5").get(ID)
    assert keep.trials(kept_run)[0].startswith("3 trials kept, ")
    kept = kept_run / "trials" / ID
    names = {path.name for path in kept.iterdir()}
    assert names == {"spec.json", "evidence.json.gz", "verdict.json", "explain.txt", "stdout.txt",
                     "samples.csv"}  # fmt: skip
    assert len((kept / "samples.csv").read_text().splitlines()) == 2000
    cell = {path.name for path in (kept_run / "trials" / "print-schedule").iterdir()}
    assert cell == {"spec.json", "result.json"}
    assert not {OTHER, "other-cell"} & {path.name for path in (kept_run / "trials").iterdir()}
    small, same = Ledger(kept_run / "trials").get(ID)
    assert verdict.label == same.label == judge(small).label == "HANG:lock"
    assert len(small.samples) <= len(evidence.samples) / 2 and "kept small: " in small.notes[-1]
    assert "kept small: " in (kept / "explain.txt").read_text()
    assert (kept / "evidence.json.gz").stat().st_size <= keep.LEAST


def test_a_long_log_is_cut_to_its_ends_which_says_so_and_no_path_of_a_machine_is_left(kept_run):
    keep.trials(kept_run)
    text = (kept_run / "trials" / ID / "stdout.txt").read_text()
    assert text.startswith("first\nxx") and len(text) < 5000
    assert f"[{len(LOG) - 2 * keep.ENDS} bytes left out]" in text
    assert text.endswith("last, in a/b.py and nsa/config.py\n")
    assert read_json(kept_run / "trials" / ID / "spec.json") == {"folder": "b/c"}


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("/home/someone/lib/python3.11/site.py:12 f", "/usr/lib/python3.11/site.py:12 f"),
        ("/v/lib/python3.11/site-packages/torch/nn/a.py:1 f", "/site-packages/torch/nn/a.py:1 f"),
        (f'"{ROOT}/workbook/lab/x.py:3 g"', '"workbook/lab/x.py:3 g"'),
        ("~/proj/net/train.py:7 step", "net/train.py:7 step"),
        ("/proc/12/task/14, and/or 3 /4 </b>", "/proc/12/task/14, and/or 3 /4 </b>"),
        ("https://a.org/b/c 2/3", "https://a.org/b/c 2/3"),
    ],
)  # fmt: skip
def test_a_file_is_named_by_its_place_in_a_package_or_by_two_parts(path, left):
    assert keep.without_paths(path) == left


@pytest.mark.processes
def test_keeping_adds_to_git_what_is_evidence_and_nothing_else(kept_run):
    told = keep.keep(kept_run)
    assert told[-1].startswith("not added to git: fatal: not a git repository")
    subprocess.run(["git", "init", "-q", kept_run.parents[2]], check=True)
    (kept_run.parents[2] / ".gitignore").write_text("/runs/\n")
    assert keep.keep(kept_run)[-1] == f"added to git: {kept_run}"
    listed = ["git", "-C", str(kept_run), "ls-files"]
    added = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    assert {"record.json", "verdicts.json", f"trials/{ID}/verdict.json"} <= set(added)
    assert {name.split("/")[1] for name in added if "/" in name} == {ID, DIGITS, "print-schedule"}
    assert "report.html" not in added


@pytest.mark.processes
@pytest.mark.parametrize("elsewhere", [True, False])
def test_rows_that_git_has_in_the_file_they_were_read_from_are_kept_once(
    kept_run, elsewhere, monkeypatch
):
    top = kept_run.parents[2]
    monkeypatch.setattr(environment, "PACKAGE", top / "nsa")
    read = kept_run.parent / "rows_of_a_gpu.jsonl"
    read.write_text("{}\n")
    (kept_run / "rows.jsonl").write_text("{}\n")
    (kept_run / "parameters.yaml").write_text(f"rows: [{read.relative_to(top)}]\n")
    subprocess.run(["git", "init", "-q", top], check=True)
    if elsewhere:
        subprocess.run(["git", "-C", top, "add", read], check=True)
    keep.keep(kept_run)
    assert ("rows.jsonl" in tracked_files(kept_run)) is not elsewhere


@pytest.mark.processes
def test_pictures_of_a_kept_notebook_have_few_colours_and_tracebacks_no_paths(kept_run):
    written, file = io.BytesIO(), kept_run / "notebook.ipynb"
    Image.radial_gradient("L").convert("RGB").save(written, "png")
    shown = {"image/png": base64.b64encode(written.getvalue()).decode()}
    told = ["\x1b[36mFile \x1b[39m\x1b[32m/home/someone/nsa/model/train.py:7\x1b[39m, in run()"]
    error = nbformat.v4.new_output("error", ename="E", evalue="e", traceback=told)
    outputs = [nbformat.v4.new_output("display_data", shown), error]
    cell = nbformat.v4.new_code_cell(outputs=outputs)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), file)
    drawn = kept_run / "figures" / "plot.svg"
    drawn.parent.mkdir()
    drawn.write_text('<svg id="1.23456"><path d="M 1.23456 7\nL 20.5 3.999"/></svg>')
    keep.keep(kept_run)
    assert drawn.read_text() == '<svg id="1.23456"><path d="M 1.23 7\nL 20.5 3.99"/></svg>'
    once = file.read_bytes()
    output, error = nbformat.read(file, as_version=4).cells[0].outputs
    assert "someone" not in error.traceback[0] and "model/train.py:7" in error.traceback[0]
    kept = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
    assert kept.mode == "P" and kept.size == (256, 256)
    keep.keep(kept_run)
    assert file.read_bytes() == once


def test_what_is_no_evidence_or_names_a_trial_that_is_gone_is_not_kept(kept_run):
    gone = f"{GONE} of commit 00{'f' * 38}"
    write_json(kept_run / "environment.json", {"git": {"commit": f"00{'f' * 38}"}})
    entry = {"claim": "c", "verdict": "PASS", "evidence": [gone, "00ffffffffff"]}
    write_json(kept_run / "verdicts.json", [entry])
    assert keep.lost_ids(kept_run) == [GONE]
    with pytest.raises(ValueError, match=f"names 1 trials that are gone: .*{GONE}"):
        keep.keep(kept_run)
    write_json(kept_run / "record.json", {"run_id": kept_run.name})
    with pytest.raises(ValueError, match=r"not made from a clean commit: run it .*--evidence"):
        keep.keep(kept_run)


def test_a_kept_trial_is_explained_in_a_clone_that_has_nothing_else(kept_run, monkeypatch, capsys):
    keep.trials(kept_run)
    (kept_run / "trials" / "step5").rename(kept_run.parents[2] / "not cloned")
    monkeypatch.chdir(kept_run.parents[2])
    for words in (["explain", ID[:6]], ["explain", "latest"], ["explain", ID, "--again"]):
        assert cli.main(words) == 1
        assert "HANG:lock; rule: " in capsys.readouterr().out
    Ledger("trials").put(ID, hung(), replace(judge(hung()), rule="its own"))
    assert cli.main(["explain", ID]) == 1
    assert "rule: its own" in capsys.readouterr().out
    assert cli.main(["explain", "ffff"]) == 2
    assert "no trial 'ffff' among 2 in trials and runs" in capsys.readouterr().err


@pytest.fixture
def tree(tmp_path):
    """A checkout with a package and a notebook, and how to ask whether a run there is evidence."""

    def git(*words):
        name = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *name, *words], check=True, capture_output=True)

    for file in ("nsa/a.py", "notebooks/01.ipynb", "README.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("one\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


def check(tree, package=None):
    environment.check_evidence(tree / "notebooks/01.ipynb", (package or tree) / "nsa")


@pytest.mark.processes
def test_evidence_is_made_from_a_clean_commit_and_the_refusal_names_what_is_not_in_it(tree):
    for name in ("runs/x.json", "figures/a.png", "scratch.txt"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("1")
    check(tree)
    for name in ("README.md", "nsa/new.py", "notebooks/mine.ipynb"):
        before = (tree / name).read_text() if (tree / name).exists() else None
        (tree / name).write_text("two\n")
        with pytest.raises(ValueError, match=rf"clean commit, and {name} differ.*: commit or"):
            check(tree)
        (tree / name).unlink() if before is None else (tree / name).write_text(before)
    check(tree)


@pytest.mark.processes
def test_evidence_needs_the_package_of_the_notebook_s_own_tree_and_in_git(tree, tmp_path_factory):
    with pytest.raises(ValueError, match=r"not in that of .*nsa, which is imported; run `python"):
        check(tree, tmp_path_factory.mktemp("other"))
    (tree / ".gitignore").write_text("inner\n")
    subprocess.run(["git", "-C", tree, "rm", "-rq", "--cached", "nsa", "notebooks"], check=True)
    with pytest.raises(ValueError, match="differ from"):
        check(tree)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("told", "good"),
    [("0123abcd", True), ("a" * 40, True), ("0123abcd-dirty", False), ("main", False), ("", False)],
)
def test_without_git_the_commit_is_told_and_a_dirty_one_is_refused(
    tmp_path, monkeypatch, told, good
):
    monkeypatch.setenv("NSA_COMMIT", told)
    if good:
        check(tmp_path)
        return
    with pytest.raises(ValueError, match=r"evidence needs the commit of .*NSA_COMMIT='"):
        check(tmp_path)


@pytest.mark.processes
def test_a_run_is_refused_before_it_starts_or_is_evidence_and_only_such_a_one_is_found_again(
    tmp_path, monkeypatch
):
    book = write_notebook(tmp_path / "notebooks" / "01_tiny.ipynb", SET_UP)
    monkeypatch.setattr(run, "_execute", lambda *given: ("ok", ""))

    def start(**options):
        return run.run_notebook(book, root=tmp_path / "runs", progress=False, **options)

    with pytest.raises(ValueError, match="is not in that of"):
        start(evidence=True)
    assert not (tmp_path / "runs").exists()
    first = start()
    monkeypatch.setattr(environment, "check_evidence", lambda notebook: None)
    second = start(evidence=True)
    assert not second.cached and second.folder != first.folder
    told = [load(one.folder)["evidence"] for one in (first, second)]
    assert told == [False, True]
    assert start(evidence=True).folder == second.folder and start().cached


@pytest.mark.processes
def test_what_ran_is_held_against_the_commit_that_the_run_names(tree, monkeypatch):
    book = "notebooks/01.ipynb"
    write_notebook(tree / book, SET_UP)
    for words in (("add", "-A"), ("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "b")):
        subprocess.run(["git", "-C", tree, *words], check=True)
    told = subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True)
    commit = told.stdout.strip()
    monkeypatch.setattr(identity, "PACKAGE", tree / "nsa")
    ran = identity.source(tree / book)
    folder = tree / "runs" / "01-aaaaaaaa"
    folder.mkdir(parents=True)

    def names(commit, **record):
        git = {"commit": commit, "dirty": None}
        write_json(folder / "environment.json", {"git": git})
        write_json(folder / "record.json", {"notebook": "01", "evidence": True, **record})
        keep.check_source(folder, tree)

    names(commit, source=ran)
    for source in ({"source": "0" * 16}, {}):
        with pytest.raises(ValueError, match=rf"and commit {commit[:12]} is {ran}: run it again"):
            names(commit, **source)
    for unknown in ("c" * 40, ""):
        with pytest.raises(ValueError, match="which git does not know"):
            names(unknown, source=ran)
    (tree / "nsa" / "new.py").write_text("changed = True\n")
    assert identity.source(tree / book) != ran == identity.source_at(commit, "01", tree)
