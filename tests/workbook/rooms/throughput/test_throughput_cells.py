"""Cells, trials and their endings: what the throughput notebook measures, on tiny models."""

import contextlib
import ctypes
import json
import math
import mmap
import platform
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nsa.model.parallel import Parallel
from nsa.model.train import DDP_WARMUP
from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure import recorders
from workbook.lab.measure.counting import Compilations
from workbook.lab.measure.recorders import MemorySamples
from workbook.lab.measure.steps import phase_ms
from workbook.rooms.correctness import lessons
from workbook.rooms.throughput import child, trials
from workbook.rooms.throughput.table import windows
from workbook.rooms.throughput.trials import TrainCell, curve_grid, throughput_grid

CELL = TrainCell("cpu_test", 32, backend="gather", batch=2, layers=1, steps=3)
TWO = CELL.with_("ranks=2 parallel=ddp")
GPU = TrainCell("cpu_test", 512, backend="triton", batch=2, precision="bf16", device="cuda")
ON_GPU = replace(CELL, device="cuda", backend="triton", tokens=256)
ENTRY = "throughput_entries:ending"


def spec(cell, **more):
    return {"cell": cell.to_dict(), "threads": 1, **more}


def measure(*cells, deadline_s=200, **options):
    return trials.measure(cells, deadline_s=deadline_s, progress=False, **options)


def replace_children(monkeypatch, ending):
    """Children of a sweep end as ending(spec, env) says."""
    monkeypatch.setattr(sweep, "run_child", lambda entry, spec, *, env, **_: ending(spec, env))


def test_a_cell_survives_json_and_says_what_it_is():
    cell = replace(CELL, changes={"phi": "mlp"}, checkpoint="all", compile=True)
    assert TrainCell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell
    assert str(cell) == "cpu_test x1 gather T=32 batch 2 fp32 cpu compile checkpoint all phi=mlp"
    assert str(TWO).endswith("2 ranks ddp")
    assert TWO.variant == "ranks=2 parallel=ddp"
    assert CELL.with_("compile").with_("batch=1").variant == "compile batch=1"
    twin = CELL.with_("attention=dense backend=auto tokens=64 compile")
    assert (twin.name, twin.tokens, twin.variant) == ("dense", 64, "compile")
    assert replace(twin, backend="sdpa").name == "dense-sdpa"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(CELL, warmup=2), "at least 3"),
        (lambda: CELL.with_("observe compile"), "which compile and cuda_graph leave out"),
        (lambda: CELL.with_("compiled"), "batch=8, or compile, cuda_graph"),
        (lambda: CELL.with_("bach=8"), "changes nothing; the nearest is 'batch'"),
        (
            lambda: TrainCell.from_dict({"preset": "cpu_test", "tokens": 8, "batches": 2}),
            "has no field 'batches'; the nearest is 'batch'",
        ),
        (lambda: throughput_grid("cpu_test", [], [64], step_tokens=64), "no cell to measure"),
        (lambda: trials.measure_curves([CELL], [], deadline_s=9), "trains nothing"),
        (
            lambda: lessons.learn_all(["window", "windw"], 64, deadline_s=60),
            "no lesson 'windw'",
        ),
    ],
)
def test_what_could_not_be_run_is_refused_before_anything_runs(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_grid_has_what_decides_then_ranks_then_variants_then_other_backends():
    cells = throughput_grid(
        "cpu_test", ["gather", "masked", "dense"], [64, 128], step_tokens=128,
        long_backends=["dense"], long_tokens=[128, 256],
        variants=["checkpoint=all"], ranks=[1, 2], parallel=["ddp", "fsdp"],
    )  # fmt: skip
    assert [(c.name, c.tokens, c.batch, c.ranks, c.variant) for c in cells] == [
        ("gather", 64, 2, 1, ""), ("dense", 64, 2, 1, ""), ("gather", 128, 1, 1, ""),
        ("dense", 128, 1, 1, ""), ("dense", 256, 1, 1, ""),
        ("gather", 64, 4, 2, "batch=4 ranks=2 parallel=ddp"),
        ("gather", 64, 4, 2, "batch=4 ranks=2 parallel=fsdp"),
        ("gather", 64, 2, 1, "checkpoint=all"), ("masked", 64, 2, 1, ""), ("masked", 128, 1, 1, ""),
    ]  # fmt: skip


def test_a_grid_of_curves_has_a_cell_a_backend_and_none_without_steps():
    sizes = {"tokens": 64, "batch": 3}
    assert curve_grid("cpu_test", ["gather"], steps=0, **sizes) == []
    (curve,) = curve_grid("cpu_test", ["dense"], steps=40, **sizes)
    assert (curve.name, curve.batch, curve.steps) == ("dense", 3, 40)
    on_gpu = {"variant": "cuda_graph", "device": "cuda"}
    (curve,) = curve_grid("cpu_test", ["gather"], steps=40, **on_gpu, **sizes)
    assert curve.cuda_graph and (curve.steps, curve.variant) == (40, "cuda_graph")


@pytest.fixture(scope="module")
def found():
    """One cell, measured in this process."""
    return child.measure_rank(spec(CELL))


def test_a_trial_measures_steps_that_nobody_watches(found):
    assert len(found["step_ms_each"]) == CELL.steps
    assert found["step_ms"] == np.median(found["step_ms_each"])
    assert found["tokens_s"] == pytest.approx(3 * 64e3 / sum(found["step_ms_each"]))
    assert found["recount_tokens_s"] == pytest.approx(found["tokens_s"], rel=0.01)
    assert len(found["losses"]) == CELL.warmup + CELL.steps
    assert found["losses"][-1] < found["losses"][0]
    assert list(found["phase_ms"]) == ["data", "forward", "backward", "optimizer"]
    assert found["recompilations"] == 0 and found["syncs"] is None
    assert found["peak_mib"] > 0 and found["matmul_tflops"] > 0 and found["loader_wait_ms"] >= 0
    assert found["paths"]["slc"] == ["gather-chunks"]
    assert len(found["host_mib"]) == CELL.steps and found["device_mib"] == []
    json.dumps(found)


def test_a_backend_that_does_not_take_the_model_says_why():
    flex = replace(CELL, backend="flex")
    assert "no backward on cpu" in child.measure_rank(spec(flex))["declined"]
    assert "no backward on cpu" in child.train(spec(flex, seed=1))["declined"]


@pytest.mark.full
def test_observers_and_the_place_among_ranks_are_put_back():
    with trials.opened(spec(CELL)) as (_, trainer):
        trainer.step(0)
        place = trainer.parallel
        phase_ms(trainer, child.WATCHED)
        child.communication_ms(trainer)
        assert trainer.observers == () and trainer.parallel is place
        turns = 2 * (child.ROUNDS + 1)
        assert trainer.steps_done == 1 + child.WATCHED + turns * (child.TURN + 1)


def test_steps_without_communication_send_nothing_even_in_the_last_micro_batch():
    seen = []

    class Wrapped(torch.nn.Module):
        def no_sync(self):
            seen.append("no sync")
            return contextlib.nullcontext()

    trainer = SimpleNamespace(parallel=Parallel("ddp", 1, 2))
    with trainer.parallel.micro(Wrapped(), True):
        assert seen == []
    with child.unsynced(trainer):
        with trainer.parallel.micro(Wrapped(), True):
            assert seen == ["no sync"]
        assert trainer.parallel.kind == "ddp"
        assert (trainer.parallel.rank, trainer.parallel.ranks) == (1, 2)
    assert type(trainer.parallel) is Parallel


@pytest.mark.full
def test_communication_is_what_a_step_waits_for_others():
    class Waiting(SimpleNamespace):
        """2 ms of a step are its own, 6 more a wait for another rank's gradients."""

        device, steps_done = torch.device("cpu"), 0

        def step(self, number):
            self.steps_done += 1
            time.sleep(0.008 if type(self.parallel) is Parallel else 0.002)

    found = child.communication_ms(Waiting(parallel=Parallel("ddp", 0, 2)))
    assert found == pytest.approx(6, rel=0.25)


@pytest.mark.processes
@pytest.mark.full
def test_two_ranks_are_one_row_of_the_slower_one_or_of_the_first_to_fail(tmp_path):
    row, failed = measure(replace(TWO, seed=0), replace(TWO, seed=1), entry=ENTRY, folder=tmp_path)
    assert row["outcome"] == "ok" and row["variant"] == "ranks=2 parallel=ddp"
    assert (row["step_ms"], row["tokens_s"]) == (20.0, 500.0)
    assert row["losses"] == [0.5, 3.0]  # a rank's loss is its share of the batch's
    assert [rank["step_ms"] for rank in row["by_rank"]] == [10.0, 20.0]
    assert list(tmp_path.glob("000-*/rank-1.json"))
    assert failed["outcome"] == "oom"
    assert failed["message"].startswith("rank 1 of 2: MemoryError")


@pytest.mark.processes
@pytest.mark.slow  # notebook 04 trains with DDP
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_two_ranks_train_with_gloo_and_ddp_says_what_communication_costs(kind, found):
    (row,) = measure(CELL.with_(f"ranks=2 parallel={kind}"), threads=1)
    assert row["outcome"] == "ok", row["message"] + row["evidence"]
    assert math.isfinite(row["communication_ms"]) == (kind == "ddp")
    assert len(row["by_rank"]) == 2 and row["parameters"] > 200_000 and row["peak_mib"] > 3
    assert row["losses"] == pytest.approx(found["losses"], rel=1e-4)


def test_curves_of_equal_seeds_are_equal_and_of_other_weights_others():
    cell = replace(CELL, steps=4)
    first, again, other = (child.train(spec(cell, seed=seed)) for seed in (1, 1, 2))
    assert first["losses"] == again["losses"] != other["losses"]
    assert len(other["losses"]) == len(first["host_mib"]) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_curves_on_several_gpus_are_trained_beside_each_other(monkeypatch, workers):
    seen, meet = [], threading.Barrier(2 * workers, timeout=20)

    def ending(spec, env):
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        meet.wait()  # for the other GPU's, and for those beside it
        return Outcome("ok", {"losses": [float(spec["cell"]["tokens"])]}, 0.1, "", 0)

    replace_children(monkeypatch, ending)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,7")
    cells = [TrainCell("cpu_test", tokens, device="cuda") for tokens in (32, 64)]
    rows = trials.measure_curves(cells, [1, 2], deadline_s=9, workers=workers, progress=False)
    assert sorted(seen) == ["2", "2", "7", "7"]
    assert [row["losses"] for row in rows] == [{"1": [t], "2": [t]} for t in (32.0, 64.0)]


def test_a_seed_that_breaks_off_leaves_the_others_losses(monkeypatch):
    late = Outcome("timeout", None, 9.0, "still running", -9)
    good = Outcome("ok", {"losses": [5.0], "host_mib": [7.0]}, 1.0, "", 0)
    replace_children(monkeypatch, lambda spec, env: good if spec["seed"] else late)
    cells = [TrainCell("cpu_test", 32, device="cpu")]
    (row,) = trials.measure_curves(cells, [1, 0, 1], deadline_s=9, progress=False)
    assert (row["outcome"], row["message"]) == ("timeout", "seed 0: still running")
    assert (row["losses"], row["host_mib"], row["seconds"]) == ({"1": [5.0]}, [7.0], 10.0)


def test_what_is_compiled_meanwhile_is_counted():
    compiled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    counts = []
    for size in (3, 3, 4):
        with Compilations() as found:
            compiled(torch.ones(size))
        counts.append(found.count)
    assert counts == [1, 0, 1]


def test_memory_is_sampled_after_each_step():
    samples = MemorySamples(torch.device("cpu"))
    samples.on_step(0, torch.zeros(()))
    with mmap.mmap(-1, 2**25) as ballast:
        ballast.write(b"x" * 2**25)
        samples.take()
    assert samples.host_mib[1] - samples.host_mib[0] > 30
    assert samples.device_mib == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_freed_memory_that_malloc_keeps_hides_no_growth():
    """It is given back before the first sample; blocks that live hold it between them."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(2**16) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, 2**16)
    for block in blocks[::2]:
        libc.free(block)
    kept = recorders.resident_mib()
    MemorySamples(torch.device("cpu")).take()
    assert kept - recorders.resident_mib() > 24  # of the 32 that are free
    for block in blocks[1::2]:
        libc.free(block)


def test_windows_keep_the_mean_and_say_where_they_stand():
    parts = windows(list(range(200)))
    assert len(parts) == 50 and parts[0] == (1.5, 1.5) and parts[-1] == (197.5, 197.5)
    assert windows([4.0, 6.0]) == [(0.0, 4.0), (1.0, 6.0)] and windows([]) == []


def test_a_step_is_profiled_on_a_cpu():
    found = child.profile_cell(spec(CELL))
    assert any("mm" in row["name"] for row in found["kernels"])
    assert 0 < found["busy_ms"] <= 1.05 * found["step_ms"]
    assert found["launches"] is None and found["syncs"] is None


def test_answers_of_a_lesson_say_what_was_wanted():
    row = {
        "lesson": "window", "accuracy": {"inside": 1.0, "outside": 0.1}, "steps": 50, "peek": 0.0,
        "chance": {"inside": 0.1, "outside": 0.1}, "expected": {"inside": True, "outside": False},
    }  # fmt: skip
    lines = lessons.answers([row, {"lesson": "copy"}])
    assert [line["wanted"] for line in lines] == ["at least 0.9", "about chance: out of reach"]


def test_lessons_learnt_side_by_side_keep_their_order(monkeypatch):
    def ending(spec, env):
        time.sleep(0.2 if spec["lesson"]["name"] == "window" else 0.0)
        return Outcome("timeout", None, 1.0, "late", None)

    replace_children(monkeypatch, ending)
    rows = lessons.learn_all(["window", "copy"], 64, deadline_s=9, workers=2, progress=False)
    found = [(row["lesson"], row["outcome"]) for row in rows]
    assert found == [("window", "timeout"), ("copy", "timeout")]


@pytest.mark.full
def test_a_cell_that_asks_is_told_what_all_observers_cost():
    found = child.measure_rank(spec(CELL.with_("observe")))
    assert 0.8 < found["watched_times"] < 5 and found["watched_ms"] > 0 < found["unwatched_ms"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # compile
@pytest.mark.parametrize("variant", ["", "compile", "cuda_graph"])
def test_a_gpu_step_waits_for_nothing_and_compiles_nothing_late(variant):
    found = child.measure_rank(spec(GPU.with_(variant)))
    assert found["syncs"] == 0 and found["recompilations"] == 0
    assert found["recount_tokens_s"] == pytest.approx(found["tokens_s"], rel=0.02)
    # The losses that are kept take 512 bytes each.
    assert max(found["device_mib"]) - min(found["device_mib"]) <= 0.001 * GPU.steps


@pytest.mark.gpu
def test_flex_does_not_make_the_host_wait_either():
    cell = replace(GPU, backend="flex", layers=1, batch=1)
    assert child.measure_rank(spec(cell))["syncs"] == 0


@pytest.mark.gpus2
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_gpus_train_as_one(kind):
    one, two = measure(ON_GPU, ON_GPU.with_(f"ranks=2 parallel={kind}"))
    assert [one["outcome"], two["outcome"]] == ["ok", "ok"], two["message"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert two["syncs"] == 0


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpus2)]
)
@pytest.mark.parametrize("how", ["", "compile"])
def test_ranks_under_ddp_train_by_a_cuda_graph_as_they_do_without(ranks, how):
    one = replace(ON_GPU, precision="bf16", steps=15)
    many = one.with_(f"ranks={ranks} parallel=ddp {how}".strip())
    plain, captured = measure(many, many.with_("cuda_graph"))
    assert [plain["outcome"], captured["outcome"]] == ["ok", "ok"], captured["message"]
    both = zip(plain["losses"], captured["losses"], strict=False)
    assert all(a == pytest.approx(b, abs=2e-3) for a, b in both)
    assert len(captured["losses"]) > DDP_WARMUP + 5 and captured["syncs"] == 0
    assert math.isnan(captured["communication_ms"])


@pytest.mark.gpu
def test_a_kernel_that_is_compiled_late_is_counted():
    cell, other = (replace(ON_GPU, batch=1, changes=c) for c in ({}, {"head_dim": 32}))
    with trials.opened(spec(cell)) as (_, trainer):
        trainer.step(0)
        trainer.step(1)
        with Compilations() as nothing:
            trainer.step(2)
    with Compilations() as new, trials.opened(spec(other)) as (_, trainer):
        trainer.step(0)
    assert nothing.kernels == 0 and new.kernels > 0


@pytest.mark.gpu
def test_a_gpu_step_is_profiled_kernel_by_kernel():
    found = child.profile_cell(spec(GPU))
    assert found["launches"] > 50 and found["syncs"] == 0
    assert found["busy_ms"] + found["idle_ms"] == pytest.approx(found["step_ms"])
    assert {"aten::mm", "_selected_forward"} <= {row["name"] for row in found["kernels"]}


@pytest.mark.gpu
def test_what_a_graph_keeps_counts_in_its_peak():
    cell = replace(GPU, batch=8)
    plain, captured = measure(cell, cell.with_("cuda_graph"))
    assert captured["peak_mib"] >= 0.9 * plain["peak_mib"]
