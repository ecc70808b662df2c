"""What runs within somebody's program: it counts, says who it is, and is not noticed."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from places import SUPPORT
from processes import environment_with_package, running, wait_until
from stranger import Training
from torch import nn

from whyhung.process import child
from whyhung.watch import Progress, flight_recorder, inside, layout, steps

SCRIPT = str(Path(SUPPORT, "watched_script.py"))
pytestmark = pytest.mark.processes


def watched(folder, *command, plain=False, **environment):
    """A command that has run to its end, watched unless it is plain."""
    base = {**environment_with_package(), **environment}
    done = subprocess.run(
        command,
        env=base if plain else inside.environment(folder, base),
        capture_output=True,
        timeout=120,
        check=False,
        text=True,
    )
    whos = [child.read(file) for file in sorted(folder.glob("who-*.json"))]
    errors = [file.read_text() for file in folder.glob("error-*.txt")]
    return SimpleNamespace(folder=folder, done=done, whos=whos, errors=errors)


def p(run, who):
    return layout.read(run.folder / f"progress-{who['pid']}.bin")[0]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run with workers of a loader, a spawned child, a helper, and an exit code."""
    folder = tmp_path_factory.mktemp("one")
    options = ["--spawn", "--helper", "--code", "3"]
    return watched(folder, sys.executable, SCRIPT, *options)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two ranks under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    torchrun += ["--local-addr", "127.0.0.1"]
    return watched(tmp_path_factory.mktemp("two"), *torchrun, SCRIPT, "--workers", "1")


@pytest.mark.full
def test_the_program_is_as_it_would_be_without(one, tmp_path):
    options = ["--spawn", "--helper", "--code", "3"]
    plain = watched(tmp_path, sys.executable, SCRIPT, *options, plain=True)
    assert plain.whos == [] and plain.done.returncode == one.done.returncode == 3
    assert plain.done.stdout == one.done.stdout  # argv, __main__, sys.path, loss
    assert plain.done.stderr == one.done.stderr == "" and one.errors == []


@pytest.mark.full
def test_a_step_is_one_of_the_first_optimizer_and_the_loader_is_waited_for(one):
    (who,) = one.whos
    here = p(one, who)
    assert (here.step, here.phase) == (8, "end")
    assert here.modules % 4 == 0 and here.phases > 8 * 4


@pytest.mark.full
def test_workers_children_and_helpers_are_no_ranks(one):
    (who,) = one.whos
    assert sorted(file.name for file in one.folder.iterdir()) == sorted(
        [f"progress-{who['pid']}.bin", f"who-{who['pid']}.json"]
    )
    assert inside.ranks(one.folder) == {0: who}
    assert who["argv"][1] == SCRIPT and who["rank"] is None and who["cwd"] == os.getcwd()
    assert who["python"] == sys.version.split()[0] and who["started"] > 0


@pytest.mark.full
def test_the_ranks_of_torchrun_are_told_from_its_agent(two):
    assert two.done.returncode == 0 and two.errors == []
    ranks = inside.ranks(two.folder)
    assert sorted(ranks) == [0, 1] and len(two.whos) == 3
    for rank, who in ranks.items():
        assert (who["rank"], who["local_rank"], who["world_size"]) == (rank, rank, 2)
        here = p(two, who)
        assert who["group"] and here.step == 8
    assert SCRIPT in ranks[0]["argv"]


@pytest.mark.full
def test_spawned_ranks_without_variables_are_known_by_their_process_group(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def train(rank, file, count):\n"
        "    dist.init_process_group('gloo', init_method=file, rank=rank, world_size=count)\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    model(torch.ones(2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    dist.barrier()\n"
        "if __name__ == '__main__':\n"
        "    for method, count in (('fork', 2), ('spawn', 1)):\n"
        "        args = (f'file://{sys.argv[1]}-{method}', count)\n"
        "        mp.start_processes(train, args, nprocs=count, start_method=method)\n"
    )
    run = watched(tmp_path, sys.executable, str(script), str(tmp_path / "store"))
    assert run.done.returncode == 0, run.done.stderr
    joined = [who for who in run.whos if who["group"]]
    assert sorted(who["rank"] for who in joined) == [0, 0, 1] and len(run.whos) == 4
    assert all(p(run, who).step == 1 for who in joined)
    ranks = inside.ranks(tmp_path)
    assert sorted(ranks) == [0, 1] and all(who["group"] for who in ranks.values())


SMALL = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
print("done", sys.modules.get("sitecustomize"))
"""


@pytest.mark.full
def test_a_sitecustomize_of_the_programs_own_runs_as_ever(tmp_path):
    own, folder = tmp_path / "own", tmp_path / "watched"
    own.mkdir(), folder.mkdir()
    (own / "sitecustomize.py").write_text("print('customized')\nwho = 'own'\n")
    base = environment_with_package()
    base["PYTHONPATH"] = f"{own}{os.pathsep}{base['PYTHONPATH']}"
    run = watched(folder, sys.executable, "-c", SMALL, PYTHONPATH=base["PYTHONPATH"])
    first, second = run.done.stdout.splitlines()
    assert first == "customized" and str(own) in second
    assert p(run, run.whos[0]).step == 3


@pytest.mark.full
@pytest.mark.parametrize("fault", ["no folder", "another whyhung"])
def test_what_goes_wrong_stays_unnoticed_by_the_program(tmp_path, fault):
    folder, package = tmp_path / "watched", tmp_path / "package"
    folder.mkdir(), package.mkdir()
    path = environment_with_package()["PYTHONPATH"]
    if fault == "another whyhung":
        (package / "whyhung.py").write_text("print('imported')\n")
        path = str(package)
    base = inside.environment(folder, environment_with_package() | {"PYTHONPATH": path})
    if fault == "no folder":
        folder.rmdir()
        folder.write_text("")  # nothing can be written below
    command = [sys.executable, "-c", SMALL]
    done = subprocess.run(
        command, env=base, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stdout.startswith("done") and done.stderr == ""
    if fault == "another whyhung":
        assert "imported" not in done.stdout
        (said,) = folder.iterdir()
        assert said.name.startswith("error-") and "has another whyhung" in said.read_text()


def test_an_interpreter_without_this_package_finds_it_by_its_place_alone(tmp_path):
    """One that cannot import whyhung, and has a torch of its own: here, a small imitation."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "watched").mkdir()
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    environment = inside.environment(tmp_path / "watched", base)
    code = (
        "import sys, torch; print('whyhung' in sys.modules, 'nsa' in sys.modules, "
        "[p for p in sys.path if 'whyhung' in p or 'nsa' in p])"
    )
    command = [sys.executable, "-I", "-c", code]
    isolated = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert b"No module named 'torch'" in isolated.stderr or isolated.returncode == 0
    command = [os.path.realpath(sys.executable), "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "True False []\n" and done.stderr == ""


def test_what_the_user_has_set_stays(tmp_path):
    base = {"PYTHONPATH": f"{inside.HOOK}:here", "TORCH_FR_BUFFER_SIZE": "7", "OTHER": "1"}
    given = inside.environment(tmp_path, base)
    assert given["PYTHONPATH"] == f"{inside.HOOK}:here" and given["OTHER"] == "1"
    assert given["TORCH_FR_BUFFER_SIZE"] == "7" and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in given
    plain = inside.environment(tmp_path, {})
    known = flight_recorder.ENVIRONMENT.keys() - {"TORCH_NCCL_TRACE_BUFFER_SIZE"}  # torch warns
    assert set(plain) == {*known, "PYTHONPATH", inside.FOLDER}


def test_a_process_that_loads_no_torch_leaves_nothing(tmp_path):
    run = watched(tmp_path, sys.executable, "-c", "import sys; print('nsa' in sys.modules)")
    assert run.done.stdout == "False\n" and list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_stuck_process_answers_for_its_locks_and_collectives(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import threading, torch\nlock = threading.Lock()\nwith lock, lock:\n    pass\n"
    )
    environment = inside.environment(tmp_path, environment_with_package())
    with running(subprocess.Popen([sys.executable, str(script)], env=environment)) as process:
        counts = tmp_path / f"progress-{process.pid}.bin"
        answers = [tmp_path / f"{what}-{process.pid}.json" for what in ("locks", "flight")]

        def answered():
            if layout.cells_of(counts):  # it may not have come so far
                layout.ask(counts)
            time.sleep(0.2)
            return (child.read(answers[0]) or {}).get("waits") and answers[1].is_file()

        wait_until(answered)
    (wait,) = child.read(answers[0])["waits"]
    assert (wait["name"], wait["line"]) == ("lock", f"{script}:3 <module>")
    assert wait["tid"] == process.pid and wait["holders"] == [process.pid] and wait["sure"]
    assert child.read(answers[1]) == {"entries": []}


# in this process


@pytest.fixture
def counted(tmp_path):
    made = Progress(tmp_path / "progress-0.bin")
    made.attach(steps=True)
    yield made
    made.close()


def here(counted):
    return layout.read(counted.file)[0]


def test_the_first_step_begins_with_the_first_backward(counted):
    training, seen = Training({}, None), []
    training.model.layers[0].weight.register_hook(lambda _: seen.append(here(counted).step))
    for i in range(3):
        training.step(i)
    assert seen == [0, 1, 2] and here(counted).step == 3


def test_of_several_optimizers_the_first_tells_the_step_until_it_steps_no_more(counted):
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight]) for weight in weights)
    for _ in range(3):
        first.step()
        second.step()
        second.step()
    assert here(counted).step == 3
    for _ in range(steps.OTHERS + 3):
        second.step()
    assert here(counted).step == 3 + 5
    del second
    first.step()
    first.step()
    assert here(counted).step == 3 + 5 + 2


def test_a_step_that_a_scaler_skips_is_one(counted):
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    for gradient in (1.0, float("inf"), 1.0):
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert here(counted).step == 3


def test_an_optimizer_that_steps_within_a_backward_leaves_its_counts(counted):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for one in model:
        optimizer = torch.optim.SGD(one.parameters())
        one.weight.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
    now = here(counted)
    assert now.step == 2 and now.fired == now.total > 0


def test_of_short_steps_modules_are_counted_now_and_then_and_steps_always(counted, monkeypatch):
    counted._stop.set()  # the beats come from here
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock.now)
    counted.pace = steps.Pace(counted)
    training = Training({"depth": 3}, None)

    def beat(count):
        for i in range(count):
            training.step(i)
        clock.now += 0.1
        counted.pace()

    beat(1)
    assert counted.fine  # a step in a tenth of a second is worth its price
    beat(100)
    assert not counted.fine
    before = here(counted).step
    beat(100)
    assert here(counted).step == before + 100 and here(counted).modules == 0
    clock.now += steps.MOST_REST_S
    beat(1)
    training.model(torch.ones(4, 16))
    assert counted.fine and here(counted).modules == 4


def test_a_compiled_model_is_not_compiled_again_because_it_is_counted(counted):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters())
    for number in range(6):
        counted.fine = number not in (3, 4)
        fast(torch.ones(4)).sum().backward()
        optimizer.step()
    assert len(compiled) == 1 and here(counted).step == 6
