"""Steps under torch.compile and as CUDA graphs: the same numbers, and nothing compiled twice."""

from functools import cache, partial

import observed
import pytest
import torch
import torch.distributed as dist
from compiled_steps import CASES, STEPS, graphs
from processes import told_by
from tiny_models import tiny
from torch._dynamo.utils import counters

from nsa.attention.witness import recording
from nsa.model import train
from nsa.model.parallel import SINGLE, Parallel
from nsa.model.presets import dense_twin
from nsa.model.train import WARMUP, TrainConfig

# torch.compile reads .grad of every input and hides the warning only from the console.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

GENERATED = ("dense",)  # whose code is generated; of another it takes a minute and more
ALLOWED = {name: 3e-3 if "bf16" in name else 1e-4 for name in CASES}  # nats
KERNELS = tiny(head_dim=16, backend="triton")
trainer = partial(observed.trainer, lr=3e-3)
on_gpu = partial(trainer, device="cuda", config=KERNELS)


@cache
def compiled(backend, *names):
    return told_by("compiled_steps.py", backend, *names, interpreted=True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "names", "name"),  # of torch.compile; "eager" generates no code: tracing decides
    [
        pytest.param(backend, names, name, marks=mark, id=f"{backend}-{name}")
        for backend, names, mark in (
            ("eager", tuple(CASES), pytest.mark.full),
            ("inductor", GENERATED, pytest.mark.slow),
            ("inductor", tuple(x for x in CASES if x not in GENERATED), pytest.mark.long),
        )
        for name in names
    ],
)
def test_all_blocks_are_one_graph_made_once_that_trains_as_they_do(backend, names, name):
    found = compiled(backend, *names)[name]
    made = 2 if "shared selection" in name else 1  # blocks that select, and those that do not
    assert found["graphs"] == [[made, 0], [made, 0]]
    assert found["losses"] == pytest.approx(found["plain"], abs=ALLOWED[name])
    assert found["names"], "a parameter changed its name"
    if backend == "eager":
        # q, k and v; o_proj; gate; up; down. An MLP of two layers makes the gates.
        assert found["products"] == made * [5 if name == "dense" else 7]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_kernels_train_inside_generated_code(precision):
    torch._dynamo.reset()
    counters.clear()
    config = KERNELS.with_(layers=3)
    generated = on_gpu(config=config, compile=True, precision=precision)
    losses = generated.run(2)
    made = graphs()
    losses += generated.run(STEPS - 2)
    assert graphs() == made == [1, 0]
    plain = on_gpu(config=config, precision=precision).run(STEPS)
    assert losses == pytest.approx(plain, abs=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16", "accumulate": 2},
        {"schedule": "cosine", "steps": 10, "clip": None},
        {"compile": True, "precision": "bf16"},
        *({"config": KERNELS.with_(backend=name)} for name in ("gather", "masked", "sdpa")),
        {"config": dense_twin(KERNELS, backend="sdpa")},
    ],
    ids=["fp32", "bf16 accumulated", "cosine", "compiled", "gather", "masked", "sdpa", "dense"],
)
def test_a_captured_step_trains_as_one_that_is_launched(settings):
    captured, plain = on_gpu(cuda_graph=True, **settings), on_gpu(**settings)
    steps = WARMUP + 5
    assert captured.run(steps) == pytest.approx(plain.run(steps), abs=1e-3)
    assert captured._captured.graph is not None
    for one, other in zip(captured.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_a_captured_step_takes_the_rate_and_the_batch_of_its_step():
    captured = on_gpu(cuda_graph=True)
    captured.run(WARMUP + 1)
    before = [p.detach().clone() for p in captured.parameters]
    captured.config = captured.config.with_(lr=1e-30, min_lr=0.0)
    first, second = captured.step(50).item(), captured.step(51).item()
    assert first != second  # other batches
    moved = [(p - q).abs().max().item() for p, q in zip(captured.parameters, before, strict=True)]
    assert max(moved) < 1e-12  # at no rate
    assert captured.step(50).item() == pytest.approx(first, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_replayed_step_does_not_wait_for_the_gpu():
    captured = on_gpu(cuda_graph=True)
    captured.run(WARMUP + 2)
    with observed.no_sync():
        captured.step(WARMUP + 2)


@pytest.mark.gpu
def test_a_closed_trainer_has_no_graph_and_a_further_step_captures_one():
    captured, plain = on_gpu(cuda_graph=True), on_gpu()
    losses = captured.run(WARMUP + 2)
    captured.close()
    assert captured._captured.graph is None
    losses += captured.run(2)
    assert captured._captured.graph is not None
    assert losses == pytest.approx(plain.run(WARMUP + 4), abs=1e-3)


@pytest.mark.gpu
def test_a_capture_leaves_no_count_of_non_finite_outputs_behind():
    captured = on_gpu(cuda_graph=True)
    with recording() as seen:
        captured.run(WARMUP + 3)
        torch.full((2**20,), float("nan"), device="cuda")
        captured.run(3)
    assert seen.non_finite() == {}


@pytest.mark.parametrize(
    ("settings", "parallel", "message"),
    [
        ({"precision": "fp16"}, {}, r"precision='fp16'.*'bf16' needs no scaler"),
        ({}, {"kind": "fsdp"}, "parallel='fsdp'.*parallel='ddp' would do"),
        ({}, {"find_unused_parameters": True}, "static_graph=True finds it once"),
        ({}, {"comm_hook": "bf16"}, "comm_hook='none' would do"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_reason(settings, parallel, message):
    config = TrainConfig(batch=2, tokens=32, cuda_graph=True, **settings)
    place = Parallel(**{"kind": "ddp", "rank": 0, "ranks": 2} | parallel)
    with pytest.raises(ValueError, match=message):
        train.check_capturable(config, torch.device("cuda"), place)


def test_of_ranks_only_what_nccl_sends_is_captured_and_strict_models_never_are(monkeypatch):
    config, place = TrainConfig(batch=2, tokens=32, cuda_graph=True), Parallel("ddp", 0, 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    with pytest.raises(ValueError, match=r"backend='gloo'.*backend='nccl' would do"):
        train.check_capturable(config, torch.device("cuda"), place)
    train.check_capturable(config, torch.device("cuda"), SINGLE)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    train.check_capturable(config, torch.device("cuda"), place)
    with pytest.raises(ValueError, match="cuda_graph=True needs a CUDA device, got device='cpu'"):
        trainer(cuda_graph=True)
    with pytest.raises(ValueError, match="strict=True looks at values in the middle of a step"):
        trainer(config=tiny(strict=True), compile=True)
