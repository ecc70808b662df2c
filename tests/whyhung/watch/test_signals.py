"""Signals at random moments: a watched program gets each, and what its handlers raise."""

import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import signalled
from places import SUPPORT
from processes import environment_with_package
from signalled import CAUGHT, CELLS, HANDLED, PID, RAISED, READY, SIGNALS, STOP

from whyhung.watch import inside, layout

WITHIN_S = 60.0  # a handler runs, at any load
pytestmark = pytest.mark.processes


def sent(folder, kind, count, *, watched=True, python=sys.executable, seed=0):
    """Counts of `count` signals, sent one after the other: handled, caught, lost."""
    folder.mkdir(exist_ok=True)
    file, told = folder / f"cells-{kind}-{watched}", folder / f"told-{kind}-{watched}.txt"
    file.write_bytes(bytes(8 * CELLS))
    cells, draw = signalled.opened(file), random.Random(seed)
    base = environment_with_package()
    environment = inside.environment(folder, base) if watched else base
    command = [python, os.path.join(SUPPORT, "signalled.py"), kind, str(file)]
    with (
        open(told, "w") as stream,
        subprocess.Popen(command, env=environment, stdout=stream, stderr=stream) as process,
    ):

        def wait(condition, within_s=WITHIN_S):
            end = time.monotonic() + within_s
            while process.poll() is None and time.monotonic() < end:
                if condition():
                    return True
                time.sleep(0.001)
            return False

        try:
            assert wait(lambda: cells[READY]), told.read_text()
            lost = number = 0
            while number < count:
                raised, caught, ready, handled = (
                    cells[cell] for cell in (RAISED, CAUGHT, READY, HANDLED)
                )
                time.sleep(draw.uniform(0.001, 0.03))
                many = 1 if kind == "agent" else draw.choice((1, 2))
                for one in draw.sample(SIGNALS[:2] if kind == "agent" else SIGNALS, many):
                    os.kill(cells[PID], one)
                    time.sleep(draw.uniform(0.0, 0.001))
                number += many
                if kind != "agent":
                    lost += not wait(lambda before=handled: cells[HANDLED] > before)
                    # A handler may raise where another one begins, which then does nothing.
                    one_of_two = kind == "raise" and many == 2
                    within_s = 2.0 if one_of_two else WITHIN_S
                    got = wait(lambda n=handled + many: cells[HANDLED] >= n, within_s)
                    lost += not (got or one_of_two)
                if kind == "agent" or cells[RAISED] > raised:
                    lost += not wait(lambda before=caught: cells[CAUGHT] > before)
                assert kind != "agent" or wait(lambda before=ready: cells[READY] > before)
                assert process.poll() is None, told.read_text()[-3000:]
            cells[STOP] = 1
            if kind == "agent":
                os.kill(cells[PID], SIGNALS[1])
            process.wait(timeout=WITHIN_S)
        finally:
            process.kill()
    text, errors = told.read_text(), [one.read_text() for one in folder.glob("error-*.txt")]
    counted = [layout.cells_of(one) for one in folder.glob("progress-*.bin")]
    return SimpleNamespace(
        sent=number,
        lost=lost,
        ignored=text.count("Exception ignored"),
        well=process.returncode == 0 and text.endswith("stopped\n") and not errors,
        steps=max((cells[layout.STEP] for cells in counted), default=None),
    )


def check(found, kind):
    """None was lost, of none what its handler raised; and the program went on."""
    print(kind, found)
    assert (found.lost, found.ignored, found.well) == (0, 0, True)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "count"), [("raise", 40), ("count", 17), ("agent", 3)])
def test_none_of_some_is_lost(tmp_path, kind, count):
    found = sent(tmp_path, kind, count)
    check(found, kind)
    assert found.steps is not None  # it was counted


@pytest.mark.long
@pytest.mark.parametrize(("kind", "count"), [("raise", 500), ("count", 350), ("agent", 150)])
def test_none_of_a_thousand_is_lost(tmp_path, kind, count):
    """Interpreter with torch that NSA_TEST_PYTHON names, or this one."""
    python = os.environ.get("NSA_TEST_PYTHON", sys.executable)
    for watched in (False, True):
        folder = tmp_path / str(watched)
        check(sent(folder, kind, count, watched=watched, python=python, seed=1), kind)
