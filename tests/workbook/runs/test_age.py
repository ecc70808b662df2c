"""Age of evidence: commits and lines since, or why nobody can tell."""

import subprocess

import pytest

from workbook.runs.age import Age, since


@pytest.fixture
def tree(tmp_path):
    """A repository with three commits: of a kernel, of a text, of that kernel."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    ids = []
    for name, text in (
        ("nsa/kernels/k.py", "a\nb\n"),
        ("README", "x"),
        ("nsa/kernels/k.py", "c\n"),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
        told = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        ids.append(told.stdout.strip())
    return tmp_path, ids


@pytest.mark.processes
def test_only_commits_of_that_code_count(tree):
    top, (first, second, third) = tree
    assert since(first, top=top) == Age(first, 1, 1, 2)
    assert since(first, second, top) == Age(first, 0) and since(third, top=top).fresh
    assert "1 commit with 1 lines more and 2 less touched" in str(since(second, top=top))


@pytest.mark.processes
def test_an_unknown_commit_is_said_and_is_not_fresh(tree, tmp_path_factory):
    top, (first, *_) = tree
    for commit, where, told in (
        ("", top, "of no known commit"),
        ("--all", top, "of no known commit"),
        ("c" * 40, top, "which git has not here"),
        (first, tmp_path_factory.mktemp("none"), "which git has not here"),
    ):
        found = since(commit, top=where)
        assert not found.fresh and not found.known and told in str(found)
