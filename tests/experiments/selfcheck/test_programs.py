"""The programs of the selfcheck: the healthy ones end, the hanging ones do not, others fail."""

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa.experiments.selfcheck import programs
from nsa.experiments.selfcheck.programs import PROGRAMS, __main__, chosen, make

FOLDER = Path(programs.__file__).parent
GROUPS = {"healthy": 60, "hang": 35, "slow": 3, "fails": 3}
COSTLY = ("compile_cold_cache", "loader_slow_first_batch")

RUN = """
import os, sys, time
from nsa.experiments.selfcheck.programs import chosen, make

if __name__ == "__main__":
    for told in sys.argv[1:]:
        name, form, port = told.split(":")
        os.environ["MASTER_PORT"] = port
        run = make({"program": name, "form": int(form)})
        losses = [run.step(i) for i in range(chosen([name])[0].steps)]
        assert all(type(loss) is float and loss == loss for loss in losses), losses
        assert list(run.losses) == []
        run.close()
        print("ended", name, form, flush=True)
"""

FORK = """
import faulthandler, os, sys
from nsa.experiments.selfcheck.programs import chosen, make

for told in sys.argv[1:]:
    name, form, rank, port = told.split(":")
    if child := os.fork():
        print(told, child, flush=True)
        continue
    os.setsid()
    if rank != "-":
        os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = port
    run = make({"program": name, "form": int(form)})
    for i in range(chosen([name])[0].steps):
        loss = run.step(i)
        if loss != loss:
            os._exit(3)
    print("ended", told, flush=True)
    os._exit(0)
while True:
    try:
        child, status = os.wait()
    except ChildProcessError:
        break
    print("left", child, os.waitstatus_to_exitcode(status), flush=True)
"""


def free_ports(count):
    """So many ports that nobody listens at."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def started(code, arguments, **environment):
    environment = os.environ | {"NSA_PROGRAM_SCALE": "0.005"} | environment
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def forms(group, ranks, first=False):
    """Each program of these in each of its forms, or in its first."""
    return [
        (each, form)
        for each in PROGRAMS
        if each.group == group and each.ranks == ranks
        for form in range(1 if first else each.forms)
    ]


def test_there_are_as_many_as_promised_each_in_two_forms_or_more():
    for group, least in GROUPS.items():
        assert sum(each.group == group for each in PROGRAMS) >= least
    assert {each.group for each in PROGRAMS} == set(GROUPS)
    assert min(each.forms for each in PROGRAMS) >= 2
    assert len({each.text for each in PROGRAMS}) == len(PROGRAMS)


def test_a_third_was_written_after_the_rules_were_frozen():
    for groups in (("healthy",), ("hang", "slow", "fails")):
        batches = [each.batch for each in PROGRAMS if each.group in groups]
        assert batches.count("frozen") * 3 >= len(batches)
        assert set(batches) == {"first", "frozen"}


def test_what_is_due_fits_the_group():
    first = {"healthy": {"PASS"}, "hang": {"HANG", "STALLED", "SLOW"}, "slow": {"SLOW"}}
    for each in PROGRAMS:
        assert each.kinds[0] in first.get(each.group, {"FAIL", "CRASH", "OOM"}), each.name
        assert each.group != "healthy" or each.seconds[0] >= 8, each.name
        assert not each.certifiable or each.kinds[0] == "HANG", each.name


def test_a_line_that_is_due_is_a_function_of_the_programs():
    trees = [ast.parse(file.read_text()) for file in FOLDER.glob("*.py")]
    functions = {n.name for t in trees for n in ast.walk(t) if hasattr(n, "name")}
    for each in PROGRAMS:
        if each.group in ("hang", "slow"):
            assert set(each.line.split(" or ")) <= functions, each.name


def test_what_there_is_not_is_named_with_what_there_is():
    with pytest.raises(ValueError, match="evaluation_in_python"):
        make({"program": "evaluation_in_pythn"})
    with pytest.raises(ValueError, match="forms 0 to 2"):
        make({"program": "evaluation_in_python", "form": 3})


def test_a_script_tells_its_losses(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["programs", "no_number", "--form", "1"])
    __main__.main()
    told = [line.rpartition(" ") for line in capsys.readouterr().out.splitlines()]
    assert [words for words, _, _ in told] == [f"step {i} loss" for i in range(6)]
    assert [loss for _, _, loss in told][3:] == ["nan"] * 3


@pytest.mark.processes
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_healthy_programs_end(quick):
    """Quick is the first form of each that takes no seconds to compile or to load."""
    told = [
        f"{each.name}:{form}:0"
        for each, form in forms("healthy", 1)
        if (form == 0 and each.name not in COSTLY) == quick
    ]
    said, complaints = started(RUN, told).communicate(timeout=500)
    ended = [":".join(line.split()[1:]) + ":0" for line in said.splitlines()]
    assert ended == told, complaints


@pytest.mark.slow
@pytest.mark.processes
def test_healthy_programs_of_two_ranks_end():
    pairs = forms("healthy", 2)
    ports = free_ports(len(pairs))
    told = [f"{each.name}:{form}:{port}" for (each, form), port in zip(pairs, ports, strict=True)]
    of_all = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [started(RUN, told, RANK=str(rank), **of_all) for rank in range(2)]
    for rank in ranks:
        said, complaints = rank.communicate(timeout=300)
        assert said.count("ended") == len(told), complaints


class Family:
    """Forms of programs, each forked from one process that has loaded torch once."""

    def __init__(self, pairs):
        told = [
            f"{each.name}:{form}:{rank}:{port}"
            for (each, form), port in zip(pairs, free_ports(len(pairs)), strict=True)
            for rank in (["-"] if each.ranks == 1 else range(2))
        ]
        self.process = started(FORK, told)
        self.children = {}
        while len(self.children) < len(told):
            line = self.process.stdout.readline().split()
            assert line, self.process.stderr.read()
            if line[0] in told:
                self.children[line[0]] = int(line[1])

    def close(self):
        for child in self.children.values():
            try:
                os.killpg(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_hangs_do_not_end(ranks, first):
    family = Family(forms("hang", ranks, first))
    try:
        time.sleep(5 if first else 12)  # a third of the processes share the cores, or all
        for told, child in family.children.items():
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            assert state != "Z", told
    finally:
        family.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("group", ["slow", "fails"])
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_slow_ones_end_and_failing_ones_fail(group, first):
    family = Family(forms(group, 1, first))
    said, complaints = family.process.communicate(timeout=300)
    codes = {line.split()[1]: int(line.split()[2]) for line in said.splitlines() if "left" in line}
    for told, child in family.children.items():
        assert (codes[str(child)] != 0) == (group == "fails"), (told, complaints)
    assert len(chosen()) == len(PROGRAMS)
