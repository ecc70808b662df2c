"""`nsa train`: what it refuses, what it leaves in a run's folder, and what becomes of its ranks."""

import json
import socket
import sys

import pytest
import torch
from train_commands import TINY, Started, losses_of, record, rows, torchrun

from nsa.model import saving
from nsa.model.presets import preset
from nsa.model.train_config import TrainConfig
from workbook.cli import main as cli
from workbook.lab.observers.deferred import SAMPLED
from workbook.rooms.training.job import EVALUATION_BATCHES, Job, evaluation, source_of

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
    (["--ranks", "2", "--port", "0"], "port 0 is none; 1 to 65535 are"),
    (["--ranks", "2", "--port", "70000"], "port 70000 is none; 1 to 65535 are"),
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


@pytest.mark.full
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
