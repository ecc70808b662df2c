"""`nsa train` ends: at its own wish, at somebody's, or because a rank was killed; and says so."""

import json
import os
import signal
import threading
import time

import pytest
from processes import free_port
from train_commands import (
    ENDS_S,
    FOREVER,
    TINY,
    Started,
    after_killing,
    losses_of,
    nsa,
    pid_in_step,
    record,
    rows,
    torchrun,
)

from nsa.model import saving
from whyhung.process import family
from workbook.cli import main as cli
from workbook.lab.observers.beat import Heartbeat


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
