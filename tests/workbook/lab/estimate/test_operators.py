"""On a GPU that is not there: which operators run, and what each allocates beside its results."""

from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._device import _device_constructors

from nsa.attention import dense
from nsa.attention.backends import triton
from nsa.attention.backends.sdpa import KERNELS, scaled_dot_product_attention
from nsa.attention.registry import Declined
from nsa.model.dense_attention import BACKENDS
from workbook.lab.estimate import estimate, operators
from workbook.lab.estimate.gpus import gpu_named
from workbook.lab.estimate.libraries import Flash
from workbook.lab.estimate.pretend import DEVICE, pretended
from workbook.lab.estimate.trace import Tracker, trace
from workbook.lab.measure.allocations import replay
from workbook.lab.training import TrainingSpec

H200, A100 = gpu_named("H200"), gpu_named("A100-SXM4-80GB")
MIB = 2**20


@pytest.fixture(autouse=True)
def poisoned_memory():
    """No memory is written, and torch knows its makers by what they are when it first asks."""
    _device_constructors.cache_clear()
    yield
    _device_constructors.cache_clear()


def spec(**options) -> TrainingSpec:
    usual = {"preset": "smoke", "tokens": 96, "layers": 1, "precision": "bf16", "device": "cuda"}
    return TrainingSpec(**usual | options)


def peak_mib(work, gpu=H200, **options) -> float:
    """MiB that `work(tracker)` holds at most, beyond what is there when it calls tracker.mark."""
    with pretended(gpu, **options), Tracker("cuda") as tracker:
        tracker.mark = lambda: tracker.trace.stream.mark("forward")
        left = work(tracker)
        stream = tracker.trace.stream
        before, start = {}, stream.marks[0][0]
        for address, size in islice(zip(stream.addresses, stream.sizes, strict=True), start):
            before[address] = max(size, 0)
        found = replay(stream)["peak"]
        del left
    return (found - sum(before.values())) / MIB


def made(*shape, dtype=torch.float32, **options):
    return torch.empty(*shape, dtype=dtype, device=DEVICE, **options)


NSA = (
    *("masked", "gather", "packed", "sdpa", "sdpa:math", "sdpa:mem_efficient", "sdpa:cudnn"),
    *("flash", "flex", "triton", "auto"),
)
DENSE = [name for name in BACKENDS if "efficient" not in name]


@pytest.mark.parametrize(
    ("attention", "backend"),
    [*(("nsa", name) for name in NSA), *(("dense", name) for name in DENSE)],
)
def test_every_backend_is_traced_and_all_its_operators_are_known(attention, backend):
    found = trace(spec(attention=attention, backend=backend), H200)
    assert {"forward", "backward", "optimizer"} <= {name for _, name in found.stream.marks}
    assert found.operators > 100 and found.unknown == {}


def test_a_backend_that_takes_no_such_inputs_declines_as_on_a_gpu():
    with pytest.raises(Declined, match="torch has no flash kernel"):
        trace(spec(backend="sdpa:flash"), H200)  # it takes no mask


@pytest.mark.parametrize(
    ("gpu", "dtype", "dims", "masked", "kernel"),
    [
        (H200, torch.bfloat16, (64, 64), True, "cudnn"),
        (H200, torch.bfloat16, (160, 160), False, "flash"),
        (H200, torch.bfloat16, (160, 160), True, "mem_efficient"),
        (H200, torch.float32, (64, 64), True, "mem_efficient"),
        (H200, torch.float32, (63, 63), True, "math"),
        (A100, torch.bfloat16, (64, 64), False, "flash"),
        (A100, torch.bfloat16, (64, 64), True, "mem_efficient"),
        (A100, torch.bfloat16, (64, 32), False, "mem_efficient"),
    ],
)
def test_torch_chooses_its_attention_kernel_by_gpu_dtype_dims_and_mask(
    gpu, dtype, dims, masked, kernel
):
    with pretended(gpu):
        q, v = (made(1, 4, 32, dim, dtype=dtype) for dim in dims)
        mask = made(1, 1, 32, 32, dtype=torch.bool) if masked else None
        chosen = torch._fused_sdp_choice(q, q, v, attn_mask=mask)
    assert chosen == KERNELS[kernel].value


def test_our_launchers_are_asked_what_they_allocate(monkeypatch):
    from nsa.kernels import ops

    def growing(*given, plain=ops.combine.delta_of):
        torch.empty(64 * MIB, dtype=torch.uint8, device=given[0].device)
        return plain(*given)

    before = replay(trace(spec(backend="triton"), H200).stream)["phases"]
    monkeypatch.setattr(ops.combine, "delta_of", growing)
    after = replay(trace(spec(backend="triton"), H200).stream)["phases"]
    assert after["forward"] == before["forward"]
    assert after["backward"] > before["backward"] + 50 * MIB


def test_nothing_pretended_is_left_behind():
    from nsa.kernels import rotary

    def turned():
        table = torch.linspace(0, 1, 64).view(16, 4)
        return rotary.rotate(table.cos(), table.sin(), None, False, [torch.ones(1, 16, 2, 8)])[0]

    expected = turned()
    names = ("get_device_capability", "get_device_properties", "current_device")
    known = [getattr(torch.cuda, name) for name in names], dense.library_for, torch.rms_norm
    trace(spec(backend="triton"), H200)
    assert known == ([getattr(torch.cuda, x) for x in names], dense.library_for, torch.rms_norm)
    assert torch.equal(turned(), expected)  # the kernel runs, and on no fake tensor
    assert type(F.rms_norm(torch.ones(2, 4), (4,))) is torch.Tensor


def test_without_triton_its_backend_says_so(monkeypatch):
    monkeypatch.setattr(triton, "INSTALLED", False)
    with pytest.raises(Declined, match=r"Triton is not installed; pip install 'nsa\[triton\]'"):
        trace(spec(backend="triton"), H200)
    found = estimate.estimate(spec(backend="masked"))
    assert found.notes[0].startswith("Triton is not installed here")
    assert found.unknown == {}


def test_autocast_keeps_the_cast_of_a_weight_until_it_ends():
    def work(tracker):
        weight = nn.Parameter(made(1024, 1024))
        x = made(1024, 1024, dtype=torch.bfloat16)
        tracker.mark()
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            assert F.linear(x, weight).dtype == torch.bfloat16
            other = made(1024, 1024)  # 4 MiB beside the cast weight's 2
        del other
        return made(1536, 1024)  # the 6 MiB of both

    assert peak_mib(work) == 6


def test_what_is_recomputed_is_cast_as_it_was():
    plain, again = (
        estimate.saved(trace(spec(backend="triton", checkpoint=which), H200))
        for which in ("", "all")
    )
    assert sum(again.values()) < sum(plain.values())


def backward_of(make):
    """Work that holds what make() gives, x and a function of it, and marks before the backward."""

    def work(tracker):
        x, function = make()
        y = function(x)
        grad = torch.empty_like(y)
        tracker.mark()
        return torch.autograd.grad(y, x, grad)

    return work


def test_softmax_has_a_product_in_its_backward():
    def make():
        return made(1024, 1024, requires_grad=True), lambda x: x.softmax(-1)

    assert peak_mib(backward_of(make)) == 4 + 4  # the gradient and grad * output


def forward_of(function, *inputs):
    def work(tracker):
        given = [make() for make in inputs]
        tracker.mark()
        return function(*given)

    return work


def square():
    return made(1024, 1024)


def test_a_log_sum_exp_makes_exponentials():
    held = peak_mib(forward_of(lambda x: x.logsumexp(-1), square))
    assert 4 < held <= 4 + 3 * 4096 / MIB


def test_a_product_copies_a_matrix_without_a_contiguous_dimension():
    def wide():
        return made(1024, 2048)

    assert peak_mib(forward_of(torch.mm, square, square)) == 4
    assert peak_mib(forward_of(lambda a, b: torch.mm(a, b.t()), square, square)) == 4
    assert peak_mib(forward_of(lambda a, b: torch.mm(a, b[:, ::2]), square, wide)) == 4 + 4


def test_a_long_sort_has_buffers_and_a_short_one_has_none():
    def by_rows(x):
        return x.sort(-1)

    assert peak_mib(forward_of(by_rows, square)) == 4 + 8
    assert peak_mib(forward_of(lambda x: by_rows(x.view(-1)), square)) == 4 + 8 + 4 + 8 + 8


def test_many_ids_are_sorted_before_an_embedding_learns():
    def make(ids):
        at = made(ids, dtype=torch.int64)
        return made(256, 1024, requires_grad=True), lambda x: F.embedding(at, x)

    assert peak_mib(backward_of(lambda: make(2048))) == 1
    assert peak_mib(backward_of(lambda: make(20480))) > 1 + 8


@pytest.mark.parametrize(("kernel", "gpu"), [("cudnn", H200), ("flash", A100)])
def test_fused_attention_adds_up_dq_in_fp32(kernel, gpu):
    def work(tracker):
        shape = 1, 4096, 16, 64
        q, k, v = (made(*shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        o, served = scaled_dot_product_attention(*heads_first, kernel, is_causal=True)
        assert served == f"sdpa:{kernel}"
        grad = torch.empty_like(o)
        tracker.mark()
        return torch.autograd.grad(o, (q, k, v), grad)

    # Gradients of q, k and v 8 MiB each; dq in fp32 16, a number for each row 0.25.
    assert peak_mib(work, gpu) == pytest.approx(3 * 8 + 16 + 0.25, abs=0.01)


@pytest.mark.parametrize(
    ("gpu", "more"),
    [
        # dq in fp32 16 MiB, dk and dv in fp32 of 4 heads 4 each, two numbers for each row.
        (H200, 16 + 2 * 4 + 2 * 0.25),
        # dq in fp32, dk and dv of each query head 8 each, a number for each row.
        (A100, 16 + 2 * 8 + 0.25),
    ],
)
def test_flash_attn_has_the_workspaces_of_its_generation(gpu, more):
    def work(tracker):
        q = made(1, 4096, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (made(1, 4096, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        o, _ = dense.dense_attention(q, k, v, scale=0.125)
        grad = torch.empty_like(o)
        tracker.mark()
        return torch.autograd.grad(o, (q, k, v), grad)

    assert peak_mib(work, gpu, flash=True) == pytest.approx(8 + 2 * 2 + more, abs=0.01)
    assert Flash(gpu.capability).library().name == ("fa4" if gpu is H200 else "fa2")


def test_an_operator_that_nothing_is_known_of_is_named():
    with pretended(H200), Tracker("cuda") as tracker:
        torch.cummax(made(256, 1024), -1)
    assert tracker.trace.unknown == {"aten.cummax.default": 256 * 1024 * (4 + 8)}


def test_the_table_names_operators_that_there_are():
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()}
    names = {name.partition(".")[0] for name in names}
    assert names >= operators.RESULTS_ONLY


class Real:
    """In place of a tracker, on a GPU that is there."""

    def mark(self) -> None:
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()


def attention(kernel: str):
    def make():
        q, k, v = (made(2, 16, 4096, 64, dtype=torch.bfloat16) for _ in range(3))
        options = {"is_causal": True}
        return q.requires_grad_(), lambda q: scaled_dot_product_attention(
            q, k, v, kernel, **options
        )[0]

    return backward_of(make)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "work",
    [
        backward_of(lambda: (made(8192, 8192, requires_grad=True), lambda x: x.softmax(-1))),
        forward_of(lambda x: x.logsumexp(-1), lambda: made(8192, 8192)),
        forward_of(lambda x: x.sort(-1), lambda: made(2**25)),
        forward_of(lambda a, b: a @ b[:, ::2], lambda: made(4096, 4096), lambda: made(4096, 8192)),
        *(attention(kernel) for kernel in ("flash", "mem_efficient", "cudnn", "math")),
    ],
    ids=("softmax", "logsumexp", "sort", "strided", "flash", "mem_efficient", "cudnn", "math"),
)
def test_a_gpu_allocates_beside_results_what_is_estimated(work):
    for _ in range(2):  # the first one makes handles and workspaces that stay
        real = Real()
        left = work(real)
        torch.cuda.synchronize()
        measured = (torch.cuda.max_memory_allocated() - real.before) / MIB
        del left
    gpu = gpu_named(torch.cuda.get_device_name())
    assert peak_mib(work, gpu) == pytest.approx(measured, rel=0.05, abs=2)
