"""Commands `nsa train` of a tiny model, in this process and in families of their own."""

import json
import os
import signal
import subprocess
import sys
import time

from whyhung.process import family

TINY = [
    *("train", "--preset", "cpu_test", "--set", "layers=1", "--set", "dim=32", "--set", "heads=4"),
    *("--set", "kv_heads=2", "--set", "head_dim=8", "--set", "backend=gather"),
    *("--data", "synthetic", "--device", "cpu", "--batch", "4", "--tokens", "48"),
]

FOREVER = ["--steps", "1000000", "--eval-every", "2", "--into", "r"]

ENDS_S = 240  # on a machine with much else to do; alone it takes a few


def record(folder):
    return json.loads((folder / "record.json").read_text())


def rows(file):
    return [line.split(",") for line in file.read_text().splitlines()[1:]]


def losses_of(folder):
    return [float(loss) for _, loss, _ in rows(folder / "losses.csv")]


class Started:
    """A command in a family of its own, so that whoever it leaves behind is found."""

    def __init__(self, command, folder):
        self.cookie = family.new_cookie()
        env = family.environment(os.environ | {"OMP_NUM_THREADS": "1"}, self.cookie)
        env.pop("RANK", None)
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=env, cwd=folder, **out)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        family.end_family(self.cookie)
        self.process.wait()
        self.process.stdout.close()

    def wait_for(self, there):
        """Until `there` returns something, which is returned."""
        deadline = time.monotonic() + 2 * ENDS_S
        while not (found := there()):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def ended(self):
        """(exit code, what was printed), and nobody of the family is left."""
        printed = self.process.communicate(timeout=ENDS_S)[0]
        assert family.family(self.cookie) == set()
        return self.process.returncode, printed


def nsa(*words):
    return [sys.executable, "-m", "nsa", *TINY, *words]


def torchrun(*words):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*run, "-m", "nsa", *TINY, *words]


def pid_in_step(folder, rank):
    """The rank's process, once it trains; 0 before."""
    beats = folder / f"beats{rank}.jsonl"
    if not beats.is_file() or '"step": ' not in beats.read_text():
        return 0
    lines = [json.loads(line) for line in beats.read_text().splitlines()]
    evaluations = folder / "evaluations.csv"  # of two, a checkpoint lies between
    return lines[0]["pid"] if evaluations.is_file() and len(rows(evaluations)) > 1 else 0


def after_killing(rank, command, place):
    """(exit code, what was printed) of the command, one of whose ranks was killed as it trained."""
    with Started(command, place) as job:
        os.kill(job.wait_for(lambda: pid_in_step(place / "r", rank)), signal.SIGKILL)
        return job.ended()
