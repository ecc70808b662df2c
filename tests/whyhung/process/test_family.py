"""Whom a cookie finds, and that whoever is found is ended."""

import os
import subprocess
import sys
import uuid

import pytest
from processes import running, wait_until

from whyhung.process import family


@pytest.fixture
def cookie():
    """A cookie of nobody else; whoever still carries it is ended after."""
    word = family.new_cookie()
    yield word
    family.end_family(word)


def ran(code, environment, **options):
    """A child that runs the code to its end."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def start_orphan(cookie):
    """Two forks and a new session: no longer a child of anything we know."""
    inner = "import subprocess as s; s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL)"
    ran(inner, family.environment(os.environ, cookie), start_new_session=True, check=True)


@pytest.mark.processes
def test_a_family_is_found_by_its_cookie_and_ended(cookie):
    start_orphan(cookie)
    assert len(family.family(cookie)) == 1
    assert family.family(uuid.uuid4().hex) == set()
    assert family.end_family(cookie) == set()
    assert family.family(cookie) == set()


@pytest.mark.processes
def test_a_cookie_made_inside_a_family_belongs_to_it_and_not_the_other_way(cookie, monkeypatch):
    monkeypatch.setenv(family.COOKIE, cookie)
    inner = family.new_cookie()
    start_orphan(inner)
    assert len(family.family(inner)) == 1
    assert family.family(inner) <= family.family(cookie)
    assert family.family(cookie[:-1]) == set()
    assert family.family(f"{inner}/deeper") == set()


@pytest.mark.processes
def test_roots_lead_to_children_that_carry_no_cookie(cookie):
    code = "import subprocess; subprocess.Popen(['sleep', '60']).wait()"
    command = [sys.executable, "-c", code]
    with running(subprocess.Popen(command, env={}, start_new_session=True)) as root:
        wait_until(lambda: len(family.family(cookie, [root.pid])) == 2)
        assert family.family(cookie) == set()
        assert family.end_family(cookie, [root.pid]) == set()
        assert root.wait(timeout=10) == -9


def test_a_process_never_finds_itself(cookie):
    assert family.family(cookie, [os.getpid()]).isdisjoint({os.getpid()})


@pytest.mark.processes
def test_a_child_imports_this_package_whatever_path_it_was_given():
    import nsa

    given = {**os.environ, "PYTHONPATH": os.pathsep.join(["/nowhere", ""])}
    environment = family.environment(given, "cookie")
    code = "import nsa, sys; print(nsa.__file__, '/nowhere' in sys.path)"
    assert ran(code, environment, cwd="/").stdout.split() == [nsa.__file__, "True"]
    assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["/nowhere"]
    twice = family.environment(environment, "cookie")
    assert twice["PYTHONPATH"] == environment["PYTHONPATH"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("parent", "ended"), [(os.getpid(), ("lives\n", 0)), (2**22 + 1, ("", 1))], ids=["here", "gone"]
)
def test_a_child_whose_parent_is_already_gone_ends_at_once(parent, ended):
    code = "from whyhung.process.family import die_with_parent; die_with_parent(); print('lives')"
    environment = family.environment(os.environ, "cookie") | {family.PARENT: str(parent)}
    done = ran(code, environment)
    assert (done.stdout, done.returncode) == ended


def test_a_signal_without_a_name_is_called_by_its_number():
    assert family.signal_name(9) == "SIGKILL"
    assert family.signal_name(40) == "signal 40"


def test_a_child_asks_the_kernel_to_let_others_look_at_it(monkeypatch):
    asked = []

    class Library:
        def prctl(self, option, value):
            asked.append((option, value.value))

    monkeypatch.setattr(family.ctypes, "CDLL", lambda _: Library())
    family.let_others_look()
    assert asked == [(int.from_bytes(b"Yama"), 2**64 - 1)]
