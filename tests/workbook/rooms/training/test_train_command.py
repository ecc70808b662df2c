"""`nsa train`: what it refuses, what it leaves in a run's folder, and what becomes of its ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from processes import free_port

from nsa.model import saving
from nsa.model.presets import preset
from nsa.model.train_config import TrainConfig
from whyhung.process import family
from workbook.cli import main as cli
from workbook.lab.observers.beat import Heartbeat
from workbook.lab.observers.deferred import SAMPLED
from workbook.rooms.training.job import EVALUATION_BATCHES, Job, evaluation, source_of

TINY = [
    *("train", "--preset", "cpu_test", "--set", "layers=1", "--set", "dim=32", "--set", "heads=4"),
    *("--set", "kv_heads=2", "--set", "head_dim=8", "--set", "backend=gather"),
    *("--data", "synthetic", "--device", "cpu", "--batch", "4", "--tokens", "48"),
]
FOREVER = ["--steps", "1000000", "--eval-every", "2", "--into", "r"]
ENDS_S = 240  # on a machine with much else to do; alone it takes a few


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


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


NCCL = ["--ranks", "4", "--dist-backend", "nccl", "--device", "auto"]
BAD_INPUT = [
    (["--preset", "produktion"], "no preset 'produktion'; the nearest is 'production'"),
    (["--set", "layers"], "'layers' is not of the form name=value, as in --set layers=2"),
    (["--set", "nsa.windw=64"], "the nearest is 'nsa.window'"),
    (["--set", "share_selection=0"], "share_selection=0 must be at least 1"),
    (["--set", "rope.base=1"], "only nsa has fields below it"),
    (["--set", "gate_temperature=-1.0"], "gate_temperature=-1.0 must be finite and greater than 0"),
    (["--checkpoint", "0:9"], "checkpoint='0:9' does not fit 1 layers"),
    (["--steps", "0"], "steps=0 must be at least 1"),
    (["--tokens", "0"], "tokens=0 must be at least 1"),
    (["--cuda-graph"], "cuda_graph=True needs a CUDA device, got device='cpu'"),
    (["--data", "short.txt"], "48 tokens and the last one's target need 49"),
    (["--resume", "gone.pt"], "--resume gone.pt: there is no such file or folder"),
    (["--data", "recall"], "48 tokens do not hold 16 pairs"),
    (["--data", "gone.txt"], "data='gone.txt' is no file or folder; known are text, synthetic"),
    (["--observe", "csv,gradients"], "no observer 'gradients'; there are csv, tensorboard"),
    (["--observe", "buckets"], "buckets are DDP's"),
    (["--guard", "memory=60GB:stop"], "'60GB' is no size of memory; write 60GiB or 512MiB"),
    (["--guard", "flatt=stop"], "guard='flatt' is unknown; known are flat, collapse, zero, memory"),
    (["--max-skips", "0"], "max_skips=0 must be at least 1 step"),
    (["--save-every", "0"], "save_every=0 must be at least 1 step"),
    (["--profile", "98:101"], "profile='98:101' is no stretch of steps 0:100; 20:23 takes three"),
    (["--profile", "20-23"], "profile='20-23' is no stretch"),
    (["--profile", "0"], "profile='0' is no stretch"),
    (["--memory-snapshot", "100"], "memory_snapshot='100' is no step from 0 to 99, counted from 0"),
    (["--memory-snapshot", "3", "--profile", "2:5"], "step 3 is profiled, and torch has one"),
    (["--observe-every", "0"], "observe_every=0 must be at least 1 step"),
    (["--accumulate", "3"], "batch=4 is not a multiple of accumulate=3"),
    (["--ranks", "3"], "batch=4 cannot be split over 3 rank(s) x 1 micro-batch(es)"),
    (["--ranks", "0"], "--ranks 0 must be at least 1"),
    (["--ranks", "2", "--parallel", "none"], "2 ranks without --parallel"),
    (["--parallel", "ddp"], "--parallel ddp needs ranks: nsa train --ranks 2"),
    (["--port", "29500"], "--port is for --ranks"),
    (["--ranks", "2", "--static-graph", "--find-unused"], "static_graph=True alone also trains"),
    (["--ranks", "2", "--parallel", "fsdp", "--find-unused"], "parallel='fsdp' has no use"),
    (["--comm-hook", "bf16"], "comm_hook: options that are DDP's; parallel='none' has no use"),
    (["--no-bucket-view"], "gradient_as_bucket_view=False: options that are DDP's"),
    (["--fsdp-keep"], "fsdp_reshard=False: options that are FSDP2's; parallel='none' has no"),
    (["--ranks", "2", "--parallel", "fsdp", "--fsdp-gather", "bf16"], "it needs precision='bf16'"),
    (["--fsdp-blocks", "0"], "fsdp_blocks=0 must be at least 1"),
    (["--ranks", "2", "--comm-hook", "bf16", "--observe", "buckets"], "DDP takes one only"),
    (NCCL, "backend='nccl' needs a GPU for each of 4 rank(s)"),
]


@pytest.mark.parametrize(("words", "message"), BAD_INPUT)
def test_bad_input_is_one_clear_line_exits_with_2_and_makes_no_run(place, capsys, words, message):
    if "nccl" in words and torch.cuda.device_count() >= 4:
        pytest.skip("there are GPUs for all")
    (place / "short.txt").write_text("too short")
    assert cli.main([*TINY, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nsa: ") and error.count("\n") == 1 and message in error
    assert not (place / "runs").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_what_auto_passed_over_is_in_the_record_and_is_told(place, capsys):
    words = ["--steps", "2", "--set", "backend=auto", "--set", "nsa.window=64", "--into", "r"]
    assert cli.main([*TINY, *words]) == 0
    attention = record(place / "r")["result"]["attention"]
    calls = sum(attention["backends"].values())
    assert attention["declined"] and calls >= 2
    printed = capsys.readouterr().out
    for name, reasons in attention["declined"].items():
        assert sum(reasons.values()) == calls
        assert f"  {name} declined: {'; '.join(reasons)}" in printed


def test_under_torchrun_ranks_are_torchruns_and_must_share(place, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([*TINY, "--ranks", "2"]) == cli.main(TINY) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "--ranks starts torchrun itself" in first
    assert "2 ranks without --parallel would each train the same model" in second


def test_a_port_in_use_is_said_before_anything_starts(place, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main([*TINY, "--ranks", "2", "--port", str(port)]) == 2
    assert f"port {port} is in use" in capsys.readouterr().err
    assert not (place / "runs").exists()


@pytest.mark.processes
def test_one_process_leaves_losses_checkpoints_and_a_record(place, capsys):
    words = ["--steps", "5", "--save-every", "2", "--eval-every", "4", "--into", "first"]
    assert cli.main([*TINY, *words, "--observe", "csv,arrival,modules,phases,ranges,stats"]) == 0
    printed = capsys.readouterr().out
    assert "first: ok" in printed and "held out" in printed
    assert "speed    not measured: steps 1 to 5 are all among the first 20" in printed
    first = place / "first"
    assert [int(step) for step, *_ in rows(first / "losses.csv")] == [0, 1, 2, 3, 4]
    assert [int(step) for step, _ in rows(first / "evaluations.csv")] == [4, 5]
    kept = saving.checkpoints(first / "checkpoints")
    assert [file.name for file in kept] == ["step-000004.pt", "step-000005.pt"]
    for name in ("arrival", "modules", "phases", "stats"):
        assert json.loads((first / f"{name}-rank0.json").read_text()), name
    assert len((first / "observed.csv").read_text().splitlines()) > 5
    assert "rank 0" in (first / "rank0.log").read_text(), "heartbeats"
    assert all(float(norm) > 0 for _, _, norm in rows(first / "losses.csv"))
    assert "grad norm" in (first / "rank0.log").read_text()
    ended = record(first)
    assert ended["status"] == "ok" and ended["result"]["steps"] == 5
    attention = ended["result"]["attention"]
    assert attention["declined"] == {} and list(attention["backends"]) == ["gather"]
    assert {"p50_ms", "p95_ms", "max_ms", "share"} == ended["result"]["waits"].keys()
    content = json.loads((first / "job.json").read_text())
    assert content.pop("argv") is not None and content["observe_every"] == SAMPLED
    assert Job.from_dict(content).to_dict() == content

    # a run that was cut in two ends where the whole one did
    assert cli.main([*TINY, "--steps", "3", "--save-every", "3", "--into", "half"]) == 0
    words = ["--observe", "arrival,modules", "--observe-every", "1"]
    assert cli.main([*TINY, "--steps", "5", "--resume", "half", "--into", "other", *words]) == 0
    for run, last in (("first", 0), ("other", 4)):
        for name in ("arrival", "modules"):
            looked_at = json.loads((place / run / f"{name}-rank0.json").read_text())
            assert {row["step"] for row in looked_at} == {last}, (run, name)
    assert rows(place / "other" / "losses.csv") == rows(first / "losses.csv")[3:]
    capsys.readouterr()

    # what cannot be resumed
    (place / "empty").mkdir()
    cut = kept[0].with_name("cut.pt")
    cut.write_bytes(kept[0].read_bytes()[:-1000])
    for words, message in (
        (["--resume", str(cut)], "is truncated or no checkpoint at all"),
        (["--resume", "first", "--set", "head_dim=4"], "model head_dim: 4, 8"),
        (["--resume", "empty"], "--resume empty: there is no checkpoint"),
        (["--resume", "first"], "it has done 5 steps and --steps 5 asks for no more"),
    ):
        assert cli.main([*TINY, "--steps", "5", *words]) == 2
        assert message in capsys.readouterr().err
    assert cli.main([*TINY, "--into", "first"]) == 2
    assert "--into first holds a run already" in capsys.readouterr().err
    assert cli.main(["show", "first"]) == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("no memory left"), "failed", "RuntimeError: no memory left"),
        (KeyboardInterrupt(), "interrupted", "the job was interrupted (Ctrl-C)"),
    ],
    ids=["an exception", "Ctrl-C"],
)
def test_what_ends_it_in_the_middle_is_recorded(place, capsys, monkeypatch, error, status, reason):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("nsa.model.train.Trainer.evaluate", broken)
    assert cli.main([*TINY, "--steps", "4", "--eval-every", "2", "--into", "r"]) == 1
    assert f"reason   {reason}" in capsys.readouterr().out
    ended = record(place / "r")
    assert ended["status"] == status
    assert len(rows(place / "r" / "losses.csv")) == 2, "what came before is kept"
    if status == "failed":
        assert ended["first_failure"]["rank"] == 0
        assert "raise error" in ended["first_failure"]["traceback"]
        assert "raise error" in (place / "r" / "rank0.log").read_text()


@pytest.mark.processes
def test_a_diverging_run_ends_at_once_with_its_cause_and_keeps_its_last_good_checkpoint(
    place, capsys
):
    words = ["--lr", "1e9", "--save-every", "1", "--into", "r"]
    assert cli.main([*TINY, *words]) == 1
    printed = capsys.readouterr().out
    assert "r: failed" in printed and "step 1: the gradient norm is nan" in printed
    assert "gradients of 18 of 20 parameters" in printed and "--lr, now 1e+09" in printed
    assert "try      --resume r" in printed
    ended = record(place / "r")
    assert ended["stop_reason"] == "non_finite" and ended["result"]["steps"] == 2
    assert rows(place / "r" / "losses.csv")[1][2] == "nan"
    (kept,) = saving.checkpoints(place / "r" / "checkpoints")
    state = saving.read(kept)
    assert state["steps_done"] == 1 and all(x.isfinite().all() for x in state["model"].values())

    assert cli.main([*TINY, *words[:2], "--nonfinite", "skip", "--max-skips", "3"]) == 1
    printed = capsys.readouterr().out
    assert "step 4: the gradient norm is nan, as were 3 steps in a row before it" in printed


@pytest.mark.processes
def test_weights_that_are_not_finite_are_never_saved(place, capsys, monkeypatch):
    class Breaking(Heartbeat):
        def on_start(self, trainer):
            super().on_start(trainer)
            self.weight = trainer.model.embed_tokens.weight

        def on_phase(self, name, step):
            super().on_phase(name, step)
            if (name, step) == ("end", 1):
                self.weight.data[0, 0] = float("inf")

    monkeypatch.setattr("workbook.rooms.training.job.Heartbeat", Breaking)
    assert cli.main([*TINY, "--save-every", "1", "--into", "r"]) == 1
    printed = capsys.readouterr().out
    assert (
        "step 1 left weights that are not finite; parameter embed_tokens.weight already" in printed
    )
    assert record(place / "r")["stop_reason"] == "non_finite"
    (kept,) = saving.checkpoints(place / "r" / "checkpoints")
    assert kept.name == "step-000001.pt"


@pytest.mark.processes
def test_a_halted_run_is_ok_saves_and_can_be_resumed(place, capsys):
    (place / "stop").write_text("lunch")
    refused = [*TINY, "--halt-file", "stop"]
    assert cli.main(refused) == 2
    assert "--halt-file stop is there already; remove it first" in capsys.readouterr().err
    (place / "stop").unlink()

    class Touching(Heartbeat):
        def on_phase(self, name, step):
            super().on_phase(name, step)
            if (name, step) == ("data", 1):
                (place / "r" / "HALT").write_text("lunch")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("workbook.rooms.training.job.Heartbeat", Touching)
        words = ["--save-every", "50", "--steps", "9", "--into", "r"]
        assert cli.main([*TINY, *words]) == 0
    assert "after step 1: the halt file r/HALT asked for it: lunch" in capsys.readouterr().out
    ended = record(place / "r")
    assert (ended["status"], ended["stop_reason"]) == ("ok", "halted")
    assert saving.newest(place / "r" / "checkpoints")["steps_done"] == 2
    assert cli.main([*TINY, "--steps", "3", "--resume", "r", "--into", "more"]) == 0


@pytest.mark.processes
def test_a_guard_ends_the_run_with_a_checkpoint_and_its_warnings_are_kept(place, capsys):
    words = ["--guard", "memory=1MiB:warn,2MiB:stop", "--save-every", "50", "--into", "r"]
    assert cli.main([*TINY, *words]) == 1
    printed = capsys.readouterr().out
    assert "r: failed" in printed and "(guard memory=2 MiB:stop)" in printed
    ended = record(place / "r")
    assert ended["stop_reason"] == "memory" and ended["result"]["stop"]["step"] == 0
    assert [one["guard"] for one in ended["result"]["warnings"]] == ["memory"]
    assert saving.newest(place / "r" / "checkpoints")["steps_done"] == 1
    assert cli.main([*TINY, "--guard", "memory=99999GiB:stop"]) == 2
    assert "can never be reached: this machine has" in capsys.readouterr().err
    assert not any(thread.name.startswith("nsa:") for thread in threading.enumerate())


@pytest.mark.real_starts
@pytest.mark.processes
@pytest.mark.slow
def test_two_ranks_end_in_order_each_with_the_cause_in_its_record(place):
    with Started(nsa("--lr", "1e9", "--ranks", "2", "--into", "r"), place) as job:
        code, printed = job.ended()
    assert code == 1 and "step 1: the gradient norm is nan" in printed and "try " in printed
    assert record(place / "r")["stop_reason"] == "non_finite"
    told = [json.loads((place / "r" / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["state"] for one in told] == ["ok", "ok"] and told[0]["stop"] == told[1]["stop"]
    assert len(told[0]["stop"]["causes"]) == 2


@pytest.mark.processes
def test_a_launch_that_fails_without_a_word_is_not_taken_for_a_success(place, capsys, monkeypatch):
    monkeypatch.setattr("workbook.rooms.training.ranks.launch", lambda *_, **__: {})
    assert cli.main([*TINY, "--ranks", "2", "--into", "r"]) == 1
    assert "no rank says why torchrun failed; see torchrun.log" in capsys.readouterr().out
    assert record(place / "r")["status"] == "failed"


def test_so_many_profiled_steps_are_those_behind_the_warm_up_or_the_last():
    def steps(profile, count=100, first=0, **train):
        train = TrainConfig(batch=1, tokens=4, steps=count, **train)
        return Job(preset("cpu_test"), train, data="synthetic", profile=profile).profiled(first)

    assert steps("3") == range(20, 23) and steps("3", first=50) == range(70, 73)
    assert steps("3", count=10) == range(7, 10) and steps("4:6") == range(4, 6)
    assert not steps("")
    with pytest.raises(ValueError, match=r"steps 4:10, before which a CUDA graph is captured"):
        steps("3:5", count=10, cuda_graph=True)
    with pytest.raises(ValueError, match="no stretch of steps 50:100"):
        steps("40:42", first=50)


@pytest.mark.processes
def test_profiled_steps_leave_a_trace_and_tables_that_are_printed(place, capsys):
    assert cli.main([*TINY, "--steps", "4", "--profile", "2:4", "--into", "p"]) == 0
    printed = capsys.readouterr().out
    assert "steps 3 to 4, ms a step; the phases sum to" in printed
    names = {file.name for file in (place / "p").glob("profile*")}
    assert names == {"profile-phases.csv", "profile-kernels.csv", "profile.txt"}
    assert (place / "p" / "trace-rank0.json.gz").stat().st_size > 1000
    assert len(losses_of(place / "p")) == 4


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_before")
def test_a_memory_snapshot_is_printed_and_in_the_report_with_its_picture(place, capsys):
    assert cli.main([*TINY, "--steps", "3", "--memory-snapshot", "--into", "m"]) == 0
    printed = capsys.readouterr().out
    assert "memory of step 1 (counted from 0) on cpu, rank 0: " in printed
    assert "of the peak is attributed to modules and lines" in printed and "llama.py:" in printed
    assert {file.suffix for file in (place / "m").glob("memory-rank0.*")} == {
        ".json", ".csv", ".txt"
    }  # fmt: skip
    assert len(losses_of(place / "m")) == 3
    assert cli.main(["report", str(place / "m")]) == 0
    page = (place / "m" / "report.html").read_text(encoding="utf-8")
    assert "Memory of one step" in page and 'alt="What the step holds by category' in page


class Numbered:
    """A stream whose batches say which they are."""

    def batch(self, step, batch, tokens, device="cpu"):
        drawn = torch.full((batch, tokens), step, device=device)
        return drawn, drawn


def test_a_stream_is_evaluated_on_its_beginning_and_trained_on_the_rest(monkeypatch):
    monkeypatch.setattr("nsa.model.streaming.stream", lambda **_: Numbered())
    job = Job(
        preset("cpu_test"),
        TrainConfig(batch=1, tokens=4, steps=2, nonfinite="stop"),
        data="fineweb-edu",
    )
    source = source_of(job)
    held_out = evaluation(source)
    trained = {int(source.batch(step, 1, 4)[0][0, 0]) for step in range(20)}
    steps = range(held_out["first_step"], held_out["first_step"] + EVALUATION_BATCHES)
    evaluated = {int(held_out["data"].batch(step, 1, 4)[0][0, 0]) for step in steps}
    assert evaluated == set(range(EVALUATION_BATCHES)) and not trained & evaluated


@pytest.mark.processes
def test_training_needs_no_package_but_torch(place, monkeypatch):
    for name in ("psutil", "pandas", "yaml", "tqdm", "papermill", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main([*TINY, "--steps", "1"]) == 0
    (folder,) = (place / "runs").glob("*/train-*")
    assert record(folder)["status"] == "ok"


@pytest.mark.processes
@pytest.mark.full
def test_a_killed_rank_takes_the_job_down_and_is_named(place):
    """Two ranks under `nsa train --ranks 2`; rank 0, which writes all files, is the one killed."""
    with Started(nsa(*FOREVER, "--save-every", "2", "--ranks", "2"), place) as job:
        pid = job.wait_for(lambda: pid_in_step(place / "r", 0))
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        code, printed = job.ended()
        assert time.monotonic() - killed < ENDS_S / 2
    assert code == 1 and "rank 0 failed first: was killed by SIGKILL" in printed
    ended = record(place / "r")
    assert ended["status"] == "failed" and ended["stop_reason"] == "rank_died"
    assert ended["first_failure"]["rank"] == 0
    assert saving.newest(place / "r" / "checkpoints")["steps_done"] >= 2
    losses = losses_of(place / "r")
    assert (place / "r" / "rank1.log").is_file()
    assert cli.main([*TINY, "--steps", "2", "--into", "one"]) == 0
    one = losses_of(place / "one")
    assert losses[:2] == pytest.approx(one, rel=1e-6), "two ranks train on one process's numbers"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_torchrun_trains_as_one_process_does_and_can_be_resumed_by_it(place, kind):
    """And with DDP each rank tells its own memory."""
    words = ["--steps", "3", "--save-every", "3", "--into", "two", "--accumulate", "2"]
    words += ["--memory-snapshot", "2"] * (kind == "ddp")
    with Started(torchrun(*words, "--parallel", kind, "--observe", "arrival"), place) as job:
        code, printed = job.ended()
    assert code == 0 and "two: ok" in printed and printed.count("  speed  ") == 1
    assert record(place / "two")["status"] == "ok"
    for name in ("rank0.log", "rank0.json", "rank1.log", "rank1.json"):
        assert (place / "two" / name).is_file()
    for rank in range(2) if kind == "ddp" else ():
        found = json.loads((place / "two" / f"memory-rank{rank}.json").read_text())
        assert (found["rank"], found["step"]) == (rank, 2) and found["explained"] > 0.95
    assert cli.main([*TINY, "--steps", "5", "--into", "one"]) == 0
    assert cli.main([*TINY, "--steps", "5", "--resume", "two", "--into", "more"]) == 0
    losses = losses_of(place / "two") + losses_of(place / "more")
    assert losses == pytest.approx(losses_of(place / "one"), rel=1e-5)
    of_ranks, whole = (
        [float(norm) for *_, norm in rows(place / run / "losses.csv")] for run in ("two", "one")
    )
    assert of_ranks == pytest.approx(whole[:3], rel=1e-4), "norms are the whole model's"


@pytest.mark.processes
@pytest.mark.slow
def test_under_torchrun_who_is_left_names_the_killed_rank(place):
    code, _ = after_killing(1, torchrun(*FOREVER, "--parallel", "ddp"), place)
    assert code != 0
    ended = record(place / "r")
    assert ended["status"] == "failed" and ended["first_failure"]["rank"] == 1


@pytest.mark.processes
@pytest.mark.slow
def test_ctrl_c_while_checkpoints_are_written_leaves_a_good_one_and_no_process(place):
    words = [*FOREVER, "--save-every", "1", "--eval-every", "1"]
    with Started(nsa(*words, "--ranks", "2"), place) as job:
        job.wait_for(lambda: pid_in_step(place / "r", 1))
        job.process.send_signal(signal.SIGINT)
        code, printed = job.ended()
    assert code == 1 and "Traceback" not in printed
    assert record(place / "r")["stop_reason"] == "interrupted"
    folder = place / "r" / "checkpoints"
    assert saving.newest(folder)["steps_done"] >= 1
    assert not list(folder.glob("*.part"))


@pytest.mark.processes
@pytest.mark.slow
def test_one_process_that_is_asked_to_end_says_so(place):
    with Started(nsa(*FOREVER), place) as job:
        job.wait_for(lambda: pid_in_step(place / "r", 0))
        job.process.terminate()
        code, printed = job.ended()
    assert code == 128 + signal.SIGTERM
    last = "nsa: the job was asked to end (SIGTERM); r holds what there is"
    assert printed.splitlines()[-1] == last
    assert record(place / "r")["stop_reason"] == "terminated"


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_rank_behind(place):
    with Started(nsa(*FOREVER, "--ranks", "2", "--port", str(free_port())), place) as job:
        job.wait_for(lambda: pid_in_step(place / "r", 1))
        job.process.kill()
        deadline = time.monotonic() + ENDS_S / 2
        while family.family(job.cookie):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.slow
def test_bad_input_that_only_a_rank_can_see_exits_with_2(place):
    (place / "cut.pt").write_bytes(b"PK")
    with Started(nsa("--ranks", "2", "--resume", "cut.pt", "--into", "r"), place) as job:
        code, printed = job.ended()
    assert code == 2 and "is truncated or no checkpoint at all" in printed
    assert "Traceback" not in printed
    assert record(place / "r")["first_failure"]["how"] == "bad input"


@pytest.mark.gpus2
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_killed_under_nccl_takes_the_job_down_and_is_named(place, kind):
    words = [*FOREVER, "--ranks", "2", "--parallel", kind, "--device", "cuda"]
    words += ["--precision", "bf16", "--dist-backend", "nccl"]
    code, printed = after_killing(1, nsa(*words), place)
    assert code == 1 and "rank 1 failed first: was killed by SIGKILL" in printed
