"""Estimates of the memory of one rank of several, made alone, compared with a real rank."""

import csv
import json
import sys

import pytest
import torch
from committed_peaks import kept_since
from places import committed_root

from nsa.model.llama import LanguageModel
from whyhung.process.ranks import run_ranks
from workbook.lab.estimate import reserved
from workbook.lab.estimate.estimate import COMPILED, estimate
from workbook.lab.estimate.gpus import gpu_named
from workbook.lab.estimate.steps import SIDE, run_of
from workbook.lab.estimate.trace import steady, trace
from workbook.lab.measure.allocations import replay
from workbook.lab.training import TrainingSpec

dist = torch.distributed
MIB = 2**20
RUNS = committed_root()


def spec_of(kind="none", ranks=1, **changes):
    """One layer of 894,120 parameters."""
    given = {"tokens": 64, "backend": "gather", "batch": 2 * ranks, "data": "synthetic"}
    return TrainingSpec(**{"preset": "step5", **given, "parallel": kind, "ranks": ranks, **changes})


def traced(kind="none", ranks=1, *, ddp=None, gpu=None, **changes):
    """Replay a later step's stream."""
    found = trace(spec_of(kind, ranks, **changes), gpu, ddp=ddp or {})
    return replay(steady(found.stream))


@pytest.fixture(scope="module")
def weights():
    """Bytes of a step's gradients, which are as many as of its weights."""
    with torch.device("meta"):
        return sum(p.nbytes for p in LanguageModel(spec_of().config()).parameters())


@pytest.fixture(scope="module")
def alone():
    return traced()


@pytest.fixture(scope="module")
def ddp():
    return traced("ddp", 2)


def test_ddp_holds_its_buckets_through_the_whole_step(alone, ddp, weights):
    more = ddp["phases"]["data"] - alone["phases"]["data"]
    assert more == pytest.approx(weights, rel=0.001), "and a few numbers to weigh its rows"
    assert ddp["held"]["gradients"] == weights, "the gradients are views of the buckets"


def test_without_views_ddp_holds_gradients_twice(ddp, weights):
    copied = traced("ddp", 2, ddp={"gradient_as_bucket_view": False})
    more = copied["phases"]["optimizer"] - ddp["phases"]["optimizer"]
    assert more == pytest.approx(weights, abs=100)


def test_a_bf16_hook_copies_a_bucket_into_half_its_bytes(weights):
    found = {
        hook: trace(spec_of("ddp", 2), ddp={"comm_hook": hook}).stream for hook in ("none", "bf16")
    }
    sizes = {hook: set(stream.sizes) for hook, stream in found.items()}
    # The bucket that fills first takes up to 1 MiB, the other one the rest.
    copies = sorted(sizes["bf16"] - sizes["none"])
    assert sum(copies) == weights / 2, "each bucket once"


def test_fsdp_holds_its_share_of_weights_gradients_and_optimizer(weights):
    found = traced("fsdp", 2)
    assert found["held"]["optimizer_state"] == pytest.approx(weights, rel=0.01)
    assert found["by_phase_category"]["data"]["parameters"] == pytest.approx(weights / 2, rel=0.01)
    assert found["by_phase_category"]["optimizer"]["gradients"] == pytest.approx(
        weights / 2, rel=0.01
    )
    assert found["cross_check"]["unknown_frees"] == 0, "what is resized is freed once"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_on_a_pretended_gpu_a_rank_holds_the_same_but_for_rounding(kind):
    here, there = traced(kind, 2), traced(kind, 2, device="cuda", gpu=gpu_named("H200"))
    more = there["phases"]["data"] - here["phases"]["data"]
    assert 0 <= more <= 30 * 3 * 512, "of each of 30 parameters, and of its two moments"


def test_fsdp_on_a_gpu_gathers_on_streams_of_its_own():
    found = trace(spec_of("fsdp", 2, device="cuda"), gpu_named("H200"))
    assert set(found.streams.values()) >= {1, 3}, "to gather, and to reduce"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_nothing_of_the_group_is_left(kind):
    before = sys.excepthook, torch.cuda.Stream, dist.all_reduce
    trace(spec_of(kind, 2))
    assert not dist.is_initialized()
    assert (sys.excepthook, torch.cuda.Stream, dist.all_reduce) == before


def test_a_process_that_is_in_a_group_is_told_so(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="this process is in one; another process would do"):
        trace(spec_of("ddp", 2))


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="comm_hook: options that are DDP's"):
        trace(spec_of("fsdp", 2), ddp={"comm_hook": "bf16"})
    with pytest.raises(ValueError, match="cuda_graph=True with parallel='fsdp'"):
        estimate(spec_of("fsdp", 2, device="cuda", cuda_graph=True))
    with pytest.raises(ValueError, match="cuda_graph=True needs a CUDA device, got device='cpu'"):
        estimate(spec_of(cuda_graph=True))


def test_fp16s_scaler_and_a_guard_are_traced_where_the_host_would_look():
    assert replay(steady(trace(spec_of(precision="fp16"), nonfinite="skip").stream))["peak"]


@pytest.fixture(scope="module")
def on_gpu():
    return trace(spec_of(device="cuda"), gpu_named("H200"))


def test_a_captured_step_holds_its_inputs_twice_and_a_pool_of_its_own(on_gpu):
    once, graph = (run_of(on_gpu, captured=captured) for captured in (False, True))
    inputs = 2 * 2 * 64 * 8  # tokens and targets, int64
    assert replay(graph.stream)["peak"] - replay(once.stream)["peak"] == inputs
    assert graph.emptied is not None and once.emptied is None
    after = [home for at, home in enumerate(graph.homes) if at > graph.emptied]
    assert (SIDE, SIDE) in after and (SIDE, 0) not in after
    held = {
        name: reserved.replay(run.stream, where=run.homes.__getitem__, emptied=run.emptied)
        for name, run in (("once", once), ("graph", graph))
    }
    assert replay(graph.stream)["cross_check"]["unknown_frees"] == 0
    assert held["graph"].out_of_memory is None
    assert held["graph"].peak.reserved > held["once"].peak.reserved
    kept = reserved.replay(graph.stream, where=graph.homes.__getitem__)
    assert kept.peak.reserved > held["graph"].peak.reserved, "what was cached was given back"


def test_steps_of_a_run_are_as_one_another(on_gpu):
    run = run_of(on_gpu, resident=64 * MIB)
    found, later = replay(run.stream), replay(steady(on_gpu.stream))
    assert found["cross_check"] == {"events": len(run.stream), "unknown_frees": 0, "lost_bytes": 0}
    assert found["peak"] == later["peak"] + 64 * MIB
    assert found["by_category"]["resident"] >= 64 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "measured_mib"),
    [
        ({}, 13594.9),
        pytest.param({"cuda_graph": True}, 13603.95, marks=pytest.mark.long),
        pytest.param({"ranks": 2, "parallel": "ddp"}, 13885.58, marks=pytest.mark.long),
        ({"ranks": 2, "parallel": "fsdp"}, 13208.34),
    ],
)
def test_of_the_h200s_records_each_is_estimated(changes, measured_mib):
    """runs/2026-11-23/04_throughput-c9ebf4f2 and -fca040d9: production, T 2048, bf16, triton."""
    measured_mib += kept_since(12, 16 * 2048, 12, 64)
    batch = 16 * changes.get("ranks", 1)
    spec = TrainingSpec(
        "production", 2048, backend="triton", batch=batch, precision="bf16", device="cuda",
        **changes,
    )  # fmt: skip
    found = estimate(spec)
    assert found.allocated / MIB == pytest.approx(measured_mib, rel=0.005)
    assert sum(found.by_category.values()) == found.allocated
    assert found.reserved >= found.allocated
    assert ("rank 0 of 2" in " ".join(found.notes)) == (spec.ranks == 2)


def test_compiled_blocks_are_told_by_what_was_recorded_of_them():
    held = {}
    for file in sorted(RUNS.glob("*/04_throughput-*/metrics.csv")):
        with file.open(newline="") as lines:
            rows = [row for row in csv.DictReader(lines) if row["metric"] == "peak_memory"]
        for row in rows:
            config = json.loads(row["config"])
            compiled, graph = config.pop("compile"), config.pop("cuda_graph")
            names = ("attention", "backend", "batch", "checkpoint", "parallel", "observe")
            cell = (file.parent.name, row["x_value"], *(config[name] for name in names))
            held.setdefault((*cell, graph), {})[compiled] = float(row["median"])
    shares = [each[True] / each[False] for each in held.values() if len(each) == 2]
    assert len(shares) >= 8
    assert (round(min(shares), 3), round(max(shares), 3)) == COMPILED
    found = estimate(spec_of(device="cuda", compile=True))
    assert found.uncertainty == pytest.approx(1 - COMPILED[0])
    assert "this is the program without compile" in found.notes[-1]


# name: (kind, options of DDP, changes of the TrainConfig, changes of the spec)
REAL = {
    "ddp": ("ddp", {}, {}, {}),
    "ddp, copied gradients": ("ddp", {"gradient_as_bucket_view": False}, {}, {}),
    "ddp accumulated, bf16 hook": ("ddp", {"comm_hook": "bf16"}, {"accumulate": 2}, {}),
    "ddp finding": ("ddp", {"find_unused_parameters": True}, {}, {}),
    "fsdp": ("fsdp", {}, {}, {}),
    "fsdp accumulated": ("fsdp", {}, {"accumulate": 2}, {"batch": 8}),
    "fsdp checkpointed": ("fsdp", {}, {}, {"checkpoint": "all", "precision": "bf16"}),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Records of both ranks, of each."""
    cells = {
        name: {"spec": cell(*how).to_dict(), "ddp": how[1], "changes": how[2]}
        for name, how in REAL.items()
    }
    folder = tmp_path_factory.mktemp("ranks")
    rows = run_ranks("rank_memory:record", cells, ranks=2, deadline_s=120, folder=folder)
    assert [row["status"] for row in rows] == ["ok", "ok"], rows
    return [row["result"] for row in rows]


def cell(kind, ddp, changes, more):
    return spec_of(kind, 2, **{"tokens": 128, "batch": 4, **more})


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", REAL)
def test_what_a_real_rank_holds_was_estimated(real, name, weights):
    kind, ddp, changes, _ = REAL[name]
    spec = cell(*REAL[name])
    found = replay(steady(trace(spec, ddp=ddp, **changes).stream))
    for rank in real:
        recorded = rank[name]["peak"]
        # Buckets that no gradient is a view of are C++'s alone, and were there before.
        recorded += weights * (name == "ddp, copied gradients")
        # The recorder may miss that gloo's own thread frees the copy that it has sent.
        late = [weights / 2] if "bf16 hook" in name else []
        rel = 0.01 if kind == "ddp" else 0.05
        held = [pytest.approx(recorded - copy, rel=rel) for copy in (0, *late)]
        assert found["peak"] in held


@pytest.mark.processes
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.gpu),
        pytest.param({"cuda_graph": True}, marks=pytest.mark.gpu),
        *(
            pytest.param(
                {"ranks": 2, "parallel": kind, "cuda_graph": graph}, marks=pytest.mark.gpus2
            )
            for kind, graph in (("ddp", False), ("ddp", True), ("fsdp", False))
        ),
    ],
    ids=str,
)
def test_what_a_gpu_allocates_and_reserves_was_estimated(how, tmp_path):
    ranks = how.get("ranks", 1)
    spec = TrainingSpec(
        "production", 2048, layers=3, backend="triton", batch=4 * ranks, precision="bf16",
        device="cuda", data="synthetic", **how,
    )  # fmt: skip
    call = {"ranks": ranks, "deadline_s": 300, "folder": tmp_path}
    rows = run_ranks("rank_memory:peaks", spec.to_dict(), **call)
    assert {row["status"] for row in rows} == {"ok"}, rows
    for row in rows:
        real = row["result"]
        found = estimate(spec, gpu=real["gpu"])
        assert found.allocated == pytest.approx(real["allocated"], rel=0.05)
        assert found.reserved == pytest.approx(real["reserved"], rel=0.10)
