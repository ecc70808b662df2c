"""Decode kernels where only a GPU can show them: large shapes, CUDA graphs, overlap."""

import pytest
import torch
from accuracy import assert_as_accurate
from cases import ODD
from decode_inputs import Step, draw, on_cache
from observed import no_sync

from nsa.config import NSAConfig
from nsa.kernels.decode import Call, decode, tuning
from nsa.kernels.tiles import architecture, processors

pytestmark = pytest.mark.gpu

PAPER = NSAConfig()
LARGE = {"kv_heads": 4, "group": 16, "dim": 128, "value_dim": 128}
STEPS = {
    "contiguous": Step((3000, 31, 4095, 0), PAPER, dtype=torch.bfloat16, **LARGE),
    "pages": Step((3000, 63, 2200), PAPER, page=64, dtype=torch.bfloat16, **LARGE),
    "16 tokens": Step(
        (2500, 1023), PAPER, 16, counts=(16, 7), page=128, dtype=torch.float16, **LARGE
    ),
    "one long": Step((9000,), PAPER, dtype=torch.float16, **LARGE),
    "192 and 128": Step(
        (2900, 1311), PAPER, kv_heads=2, group=6, dim=192, value_dim=128, dtype=torch.bfloat16
    ),
    "odd pages": Step(
        (500, 45, 19), ODD, 3, kv_heads=2, group=5, dim=48, value_dim=32, page=20
    ),
    "shared": Step((2000, 45), PAPER, shared=True, page=256, dtype=torch.bfloat16, **LARGE),
    "linear": Step(
        (1503, 47), PAPER, phi="linear", rotary=True, group=4, dim=64, value_dim=64,
        dtype=torch.bfloat16,
    ),
    "mlp": Step(
        (1503, 47), PAPER, phi="mlp", rotary=True, group=4, dim=64, value_dim=64,
        dtype=torch.bfloat16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_large_steps_are_as_accurate_as_plain_torch(name):
    step = STEPS[name]
    cache = draw(step, "cuda")
    args, kwargs = cache.arguments()
    o = decode(*args, **kwargs)
    definition = (on_cache(cache, cache.tensors, dtype) for dtype in (step.dtype, torch.float64))
    assert_as_accurate("o", o, *definition)


def growing(page):
    """A cache with room for 40 tokens more, as the launcher's arguments."""
    step = Step((1000, 15, 511), PAPER, page=page, capacity=1280, dtype=torch.bfloat16, **LARGE)
    args, kwargs = draw(step, "cuda").arguments()
    return list(args), kwargs


@pytest.mark.parametrize("page", [None, 64])
def test_a_graph_replays_while_sequences_grow(page):
    args, kwargs = growing(page)
    alone = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    spare = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    decode(*args, **spare)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode(*args, **kwargs)
        kwargs["lengths"] += 1
    for _ in range(40):
        for x in (args[0], *args[1].values(), *args[2].values()):
            x.normal_()
        graph.replay()
        eager = decode(*args, **alone)
        alone["lengths"] += 1
        assert torch.equal(o, eager)
    for name in ("k_cmp", "v_cmp", "k_slc", "v_win"):
        assert torch.equal(kwargs[name].nan_to_num(), alone[name].nan_to_num()), name


def test_the_same_step_gives_the_same_bits_a_hundred_times():
    """The parts of a token are summed in one order, whichever program is the last."""
    args, kwargs = growing(64)
    first = decode(*args, **kwargs)
    for _ in range(100):
        assert torch.equal(decode(*args, **kwargs), first)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_does_not_wait_for_the_gpu():
    args, kwargs = growing(None)
    decode(*args, **kwargs)
    with no_sync():
        decode(*args, **kwargs)


def test_launches_that_overlap_find_what_plain_ones_find():
    args, kwargs = growing(64)
    device = args[0].device
    chip = architecture(device)
    plain = tuning(Call(3, 4, 16, 128, 128, 1, 1280, PAPER, False, chip, processors(device)))
    plain = plain._replace(dependent=False)
    want = decode(*args, **kwargs, tuned=plain)
    overlapping = plain._replace(dependent=chip >= 90)
    assert torch.equal(decode(*args, **kwargs, tuned=overlapping), want)
    for splits in (1, 4):
        cut = {f"{name}_splits": splits for name in ("score", "selected", "window")}
        other = decode(*args, **kwargs, tuned=overlapping._replace(**cut))
        torch.testing.assert_close(other, want, atol=2e-2, rtol=2e-2)


def test_wide_offsets():
    """A pool of more than 2^31 elements."""
    pages = 2**31 // (64 * 4 * 128) + 70
    step = Step((200,), PAPER, page=64, dtype=torch.bfloat16, **LARGE)
    cache = draw(step, "cuda")
    args, kwargs = cache.arguments()
    want = decode(*args, **{n: x.clone() if torch.is_tensor(x) else x for n, x in kwargs.items()})
    for name in ("k_slc", "v_slc", "k_cmp", "v_cmp"):
        x = kwargs[name]
        wide = torch.zeros(pages, *x.shape[1:], dtype=x.dtype, device="cuda")
        wide[-x.shape[0] :] = x
        kwargs[name] = wide
    kwargs["table"] = kwargs["table"] + (pages - x.shape[0])
    assert torch.equal(decode(*args, **kwargs), want)
