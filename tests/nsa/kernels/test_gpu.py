"""Kernels where only a GPU can show them: large shapes, races, offsets, graphs, stray accesses."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from observed import no_sync
from places import ROOT

from nsa.attention.api import nsa_attention
from workbook.lab.measure.attention_inputs import draw
from workbook.lab.measure.shapes import Shape
from workbook.rooms.comparison.check import check
from workbook.rooms.comparison.implementations import of_backends

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape(65536),
    Shape(65536, queries="correlated"),
    Shape(16384, kv_heads=16, queries="correlated"),
    Shape(8192, heads=16, kv_heads=16, dim=64, value_dim=64),
    Shape(8192, heads=12, kv_heads=4, dim=192, value_dim=128, dtype="fp16", shared_kv=False),
    Shape(5000, heads=8, kv_heads=2, dim=256, value_dim=256, batch=2, queries="correlated"),
    Shape(3001, heads=6, kv_heads=2, dim=72, value_dim=40, dtype="fp32", batch=2),
    Shape(2048, heads=12, kv_heads=4, dim=64, value_dim=64),
]


@pytest.fixture(autouse=True)
def no_memory_left_over():
    yield
    torch.cuda.empty_cache()


def triton():
    return of_backends(["triton"])[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_long_sequences_are_as_accurate_as_plain_torch(shape):
    check(triton(), draw(shape, "cuda"))


@pytest.mark.slow
def test_offsets_past_two_to_the_31_elements():
    """A million tokens of 32 heads: q, o and their gradients have 2^32 elements each."""
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("wants 100 GiB of free memory")
    check(triton(), draw(Shape(1 << 20, heads=32, kv_heads=2), "cuda"), reveal=False)


def call(drawn, **changes):
    o = forward(drawn, **changes)
    return [o, *torch.autograd.grad(o, list(drawn.leaves().values()), drawn.do)]


def forward(drawn, **changes):
    tensors = (drawn.leaves()[name] for name in ("q", "k", "v", "gates"))
    return nsa_attention(*tensors, drawn.shape.config, backend="triton", **changes)


@pytest.mark.parametrize("queries", ["random", "correlated"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_same_inputs_give_the_same_bits_twenty_times(queries, packed):
    # Long enough for small tiles too: those of random queries late in a sequence.
    drawn = draw(Shape(32768, heads=32, kv_heads=2, queries=queries), "cuda")
    bounds = torch.tensor([0, 1, 700, 700, 4096, 32768], dtype=torch.int32, device="cuda")
    cu_seqlens = bounds if packed else None
    first = call(drawn, cu_seqlens=cu_seqlens)
    for _ in range(19):
        for before, again in zip(first, call(drawn, cu_seqlens=cu_seqlens), strict=True):
            assert torch.equal(before, again)


def test_a_cuda_graph_replays_forward_and_backward_on_new_inputs():
    drawn = draw(Shape(4096, heads=16, kv_heads=1), "cuda")
    other = draw(Shape(4096, heads=16, kv_heads=1, seed=7, queries="correlated"), "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the leaves' accumulators belong to the stream of the capture
        call(drawn)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        static = call(drawn)
    with torch.no_grad():
        for mine, theirs in zip(drawn.leaves().values(), other.leaves().values(), strict=True):
            mine.copy_(theirs)
        drawn.do.copy_(other.do)
    graph.replay()
    for replayed, eager in zip(static, call(other), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_gpu():
    drawn = draw(Shape(2048, heads=16, kv_heads=1), "cuda")
    call(drawn)  # compiles
    with no_sync():
        call(drawn)


def test_memory_beyond_inputs_and_outputs_is_small_and_linear():
    """64k tokens: below 2 GiB forward and 4 GiB backward; from 2k to 64k at most as T^1.05."""
    extra = {}
    for tokens in (2048, 65536):
        drawn = draw(Shape(tokens), "cuda")
        call(drawn)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        o = forward(drawn)
        ahead = torch.cuda.max_memory_allocated() - before - o.nbytes
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(o, list(drawn.leaves().values()), drawn.do)
        outputs = o.nbytes + sum(x.nbytes for x in grads)
        backward = torch.cuda.max_memory_allocated() - before - outputs
        extra[tokens] = ahead, backward
        del o, grads, drawn
        torch.cuda.empty_cache()
    assert extra[65536][0] < 2 * 2**30 and extra[65536][1] < 4 * 2**30, extra
    for short, long in zip(extra[2048], extra[65536], strict=True):
        assert math.log(long / short, 65536 / 2048) <= 1.05, extra


SMALL = """
import torch
from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig
config = NSAConfig(8, 4, 16, 4, window=20)
for dtype, dim in ((torch.bfloat16, 64), (torch.float32, 40)):
    on = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    q, k, v = (torch.randn(1, 333, heads, dim, **on) for heads in (6, 2, 2))
    gates = torch.rand(1, 333, 6, 3, device="cuda", requires_grad=True)
    for cu in (None, torch.tensor([0, 5, 5, 40, 333], dtype=torch.int32, device="cuda")):
        o = nsa_attention(q, k, v, gates, config, backend="triton", cu_seqlens=cu)
        o.square().sum().backward()
blocks = torch.full((1, 333, 2, 5), 1 << 30, dtype=torch.int32, device="cuda")
blocks[..., 0] = 3
blocks[..., 1] = -7
nsa_attention(q, k, v, gates, config, backend="triton", blocks=blocks).sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_compute_sanitizer_finds_no_stray_access():
    """Also for indices that a caller made up."""
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
    done = subprocess.run(
        [*command, "-c", SMALL], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.gpus2
def test_launches_go_to_the_gpu_of_the_inputs():
    shape = Shape(2048, heads=16, kv_heads=1)
    other, want = (call(draw(shape, f"cuda:{number}")) for number in (1, 0))
    torch.testing.assert_close([x.cpu() for x in other], [x.cpu() for x in want])
