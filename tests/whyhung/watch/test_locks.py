"""Who holds the lock that a thread waits for, read from frames and source alone."""

import gc
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import lock_waits
import pytest
from places import SUPPORT
from processes import environment_with_package

from whyhung.watch import frames, locks

PYTHONS = [sys.executable]
PYTHONS += filter(None, (shutil.which(f"python3.{n}") for n in (10, 11, 12, 13, 14)))


def runs(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module", params=PYTHONS, ids=lambda python: Path(python).name)
def told(request):
    """Result of `locks` for all ways to wait, in each Python that is here."""
    if not runs(request.param):
        pytest.skip("it does not start")
    command = [request.param, str(Path(SUPPORT, "lock_waits.py"))]
    environment = environment_with_package()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=60, check=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.full
def test_a_lock_is_held_by_whoever_is_inside_its_with_statement(told):
    waits = told["waits"]
    for name in ("with_lock", "second_item", "acquires", "acquires_for_a_while"):
        wait = waits[name]
        assert (wait["what"], wait["name"], wait["holders"]) == ("Lock", "self.lock", ["holder"])
        assert wait["sure"] and wait["line"].endswith(f" {name}")
        assert wait["held_at"][0].endswith(" holder")
    assert waits["subscript"]["holders"] == ["holder"]
    assert waits["of_a_class"]["holders"] == ["sleeps"]
    assert waits["twice"]["holders"] == ["twice"]  # itself


@pytest.mark.full
def test_a_reentrant_lock_names_its_owner(told):
    assert told["waits"]["with_rlock"]["what"] == "RLock"
    assert told["waits"]["condition_lock"]["what"] == "Condition"
    for name in ("with_rlock", "condition_lock"):
        wait = told["waits"][name]
        assert wait["holders"] == ["holder"] and wait["sure"] and "owner" in wait["by"]


def test_an_acquire_without_a_release_is_a_holder_of_whom_nobody_can_be_sure(told):
    one, two = told["waits"]["one"], told["waits"]["two"]
    assert one["holders"] == ["two"] and not one["sure"] and "acquire() in line" in one["by"]
    assert two["holders"] == ["one"] and two["sure"]


def test_who_waits_for_a_notification_holds_its_lock_no_more(told):
    assert told["waits"]["lets_go"]["what"] == "Condition"
    assert told["waits"]["asks_for_it"]["holders"] == ["takes_it"]


@pytest.mark.parametrize(
    "name, what",
    [
        ("condition_wait", "Condition"),
        ("event", "Event"),
        ("empty", "Queue"),
        ("full", "Queue"),
        ("simple", "Queue"),
        ("semaphore", "Semaphore"),
    ],
)
def test_what_is_waited_for_in_the_library_has_its_own_name_and_the_users_line(told, name, what):
    wait = told["waits"][name]
    assert wait["what"] == what and wait["holders"] == [] and not wait["timed"]
    assert "lock_waits.py:" in wait["line"] and wait["line"].endswith(f" {name}")


def test_only_a_wait_with_a_timeout_is_timed(told):
    timed = {name for name, wait in told["waits"].items() if wait["timed"]}
    assert timed == {"acquires_for_a_while", "event_for_a_while"}


def test_join_waits_for_its_thread_and_a_future_for_the_thread_that_computes_it(told):
    wait = told["waits"]["joins"]
    assert (wait["what"], wait["holders"]) == ("the end of", ["event"])
    assert wait["held_at"] == [""]  # an end is not held
    wait = told["waits"]["future"]
    assert wait["what"] == "Future" and len(wait["holders"]) == 1


def test_no_code_of_the_program_runs_and_it_is_over_soon(told):
    assert told["asked"] == 1  # by the program itself
    assert "asks_a_property" not in told["waits"] and "sleeps" not in told["waits"]
    assert told["errors"] == []


def test_an_expression_that_would_run_code_has_no_value():
    class Loud:
        __slots__ = ("lock",)
        loud = property(lambda self: 1 / 0)

        def __getattr__(self, name):
            raise AssertionError

        def __getitem__(self, name):
            raise AssertionError

    loud, key = Loud(), "a"
    loud.lock = threading.Lock()
    held = {"a": [loud.lock]}
    frame = sys._getframe()
    assert key and held

    def value(text):
        return frames.value(frames.ast.parse(text, mode="eval").body, frame)

    assert value("held[key][0]") is value("loud.lock") is loud.lock
    assert value("threading.Lock") is threading.Lock
    for text in ("loud.gone", "loud[0]", "loud()", "held[1]", "gone", "held['a'].x", "loud + 1"):
        assert value(text) is frames.NOTHING
    assert type(value("loud.loud")) is property  # and not what it returns


def test_a_source_that_is_another_one_by_now_names_nothing(tmp_path):
    file = tmp_path / "program.py"
    file.write_text("def run(lock):\n    with lock:\n        pass\n")
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert frames.source_of(names["run"].__code__).withs
    file.write_text("# a line more\n\n\n\n\n")
    with pytest.raises(Exception):  # noqa: B017  any: the reader goes on
        assert frames.source_of(names["run"].__code__).withs


def test_the_answer_is_a_file_and_what_counts_is_not_in_it(counters, tmp_path):
    locks.write(tmp_path, 7)
    content = json.loads((tmp_path / "locks-7.json").read_text())
    assert content["errors"] == [] and "nsa:progress" not in {w["thread"] for w in content["waits"]}
    assert lock_waits  # the program of the other tests can be imported without a thread


@pytest.fixture
def collected_often():
    """Garbage is collected in the middle of things, and another thread has its turn then."""

    def rest(*_):
        time.sleep(0.0005)

    before = gc.get_threshold()
    gc.callbacks.append(rest)
    gc.set_threshold(200)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(rest)


def test_threads_that_parse_at_once_all_get_their_trees(collected_often):
    source, failed = Path(threading.__file__).read_text(), []

    def parse():
        try:
            for _ in range(3):
                frames.parsed(source)
        except SystemError as error:  # what ast.parse raises here on CPython 3.11
            failed.append(error)

    threads = [threading.Thread(target=parse) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_source_is_parsed_again_where_the_programs_own_parsing_spoilt_it(monkeypatch):
    plain, tries = frames.ast.parse, []

    def spoilt(source):
        tries.append(source)
        if len(tries) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=63, after=58)")
        return plain(source)

    monkeypatch.setattr(frames.ast, "parse", spoilt)
    assert frames.parsed("x = 1").body[0].targets[0].id == "x"
    assert len(tries) == 3
