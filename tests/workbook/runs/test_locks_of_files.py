"""Locks of files: one process has one, and others may look at any time."""

import fcntl
import threading

import pytest

from workbook.runs.files import is_locked, locked


@pytest.fixture
def file(tmp_path):
    return tmp_path / "lock"


def test_one_has_it_and_others_see_that(file):
    assert not is_locked(file) and not file.exists()
    with locked(file) as mine:
        assert mine is not None and is_locked(file)
        with locked(file) as other:
            assert other is None
    assert not is_locked(file)


def test_who_looks_at_a_lock_keeps_nobody_from_it(file, monkeypatch):
    file.touch()
    taken, seen = fcntl.flock, []
    over = threading.Event()

    def look(opened, how):
        """Stay for a moment with what a look holds, while it is taken and looked at again."""
        found = taken(opened, how)
        if not seen and threading.current_thread() is looking:
            seen.append(how)
            over.wait(0.03)
        return found

    monkeypatch.setattr(fcntl, "flock", look)
    looking = threading.Thread(target=is_locked, args=[file])
    looking.start()
    while not seen:
        pass
    assert not is_locked(file)
    with locked(file) as mine:
        assert mine is not None
    looking.join()
