"""Every backend against the reference in float64, on the shapes that all are tested on."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from backend_calls import DEVICE, DOUBLE, FAST, NAMES, attend, check, measured, outcome, takes
from cases import CASES, ODD, SMALL, TINY, Case, draw
from torch.nn.attention import flex_attention

from nsa.attention.api import nsa_attention
from nsa.attention.backends import gather
from nsa.attention.branches import select_blocks
from nsa.config import NSAConfig
from nsa.reference.compress import compress_keys
from nsa.reference.nsa import nsa

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def each(backends, cases, dtypes):
    """Every combination that runs here; interpreted kernels take minutes for the long ones.

    Of theirs of 60 tokens and more three in four wait for `make test-long`. So do, in a second
    dtype, the exhibit's longest, which are the same loop over tokens.

    A newcomer's `make test` has the first cases of the backends that take no loop over tokens.
    """
    for backend, (dtype, name), case in product(backends, dtypes.items(), cases):
        if takes(backend, dtype):
            interpreted = case.tokens if backend == "triton" and DEVICE == "cpu" else 0
            quick = case in CASES[:4] and backend not in ("triton", "sequential")
            slow = interpreted > 200
            marks = [pytest.mark.slow] if slow else [] if quick else [pytest.mark.full]
            again = backend == "sequential" and case.tokens > 200
            bulk = (again and name != "fp32") or (interpreted >= 60 and CASES.index(case) % 4)
            marks += [pytest.mark.long] if bulk else []
            yield pytest.param(backend, case, dtype, id=f"{backend}-{case}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("backend", "case", "dtype"),
    [
        *each(NAMES, CASES, {torch.float32: "fp32", torch.bfloat16: "bf16"}),
        *each(["sdpa:math"], CASES[3:5], {torch.float32: "fp32", torch.bfloat16: "bf16"}),
        *each(FAST, CASES[6:7], {torch.float16: "fp16"}),
    ],
)
def test_backend_agrees_with_the_reference_forward_and_backward(backend, case, dtype):
    check(backend, case, dtype)


@pytest.mark.full
def test_flex_agrees_as_torch_traces_it_too(monkeypatch):
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    check("flex", CASES[12], torch.float32)


EDGE = Case(33, dim=16, value_dim=256, phi="mlp")


@pytest.mark.parametrize("backend", ["gather", "packed", "sdpa", "masked"])
@pytest.mark.parametrize("seed", range(3))
def test_few_tokens_of_wide_values_stray_by_little_of_the_largest_gradient(backend, seed):
    """Twice torch's error can be missed by luck: then the miss is small by this measure."""
    dtype, eps = torch.bfloat16, torch.finfo(torch.bfloat16).eps
    torch.manual_seed(seed)
    drawn, do, exact, torchs = measured.__wrapped__(EDGE, dtype)
    got = outcome(lambda x: attend(x, backend), drawn.to(dtype), do)
    largest = max(float(x.abs().max()) for x in exact[1].values())
    for name, truth in exact[1].items():
        ours, theirs = (float((x[1][name].double() - truth).abs().max()) for x in (got, torchs))
        assert ours <= 2 * theirs + eps / 8 * largest, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["gather", "packed", "sdpa", "masked"])
@pytest.mark.parametrize(("phi", "shifts"), [("linear", "position"), ("mlp", "bias2")])
def test_what_shifts_all_keys_of_a_head_has_a_gradient_of_rounding_alone(
    phi, shifts, backend, dtype
):
    drawn, do, exact, _ = measured(Case(63, group=2, phi=phi), dtype)
    _, got = outcome(lambda x: attend(x, backend), drawn.to(dtype), do)
    largest = max(float(x.abs().max()) for x in exact[1].values())
    name = f"phi_key_{shifts}"
    assert exact[1][name].abs().max() < 1e-12 * largest
    # AVX2 and AVX-512 add in different orders: 0.25 and 0.5 of an epsilon were seen.
    assert got[name].abs().max() <= torch.finfo(dtype).eps * largest


@pytest.mark.skipif(DEVICE != "cpu", reason="float64 on a CPU")
@pytest.mark.parametrize("phi, sinks", [("mean", "heads"), ("linear", "branches"), ("mlp", "")])
@pytest.mark.parametrize("backend", DOUBLE)
def test_gradcheck(backend, phi, sinks):
    config = NSAConfig(4, 2, 4, 2, select_initial=0, window=3)
    sizes = {"kv_heads": 1, "group": 2, "dim": 2, "value_dim": 3, "config": config}
    drawn = draw(Case(11, **sizes, phi=phi, sinks=sinks))
    assert drawn.has_the_gradients_of(lambda x: attend(x, backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", [TINY, SMALL, ODD], ids=["tiny", "small", "odd"])
@pytest.mark.parametrize("elements", [1 << 22, 20_000], ids=["one-chunk", "many-chunks"])
def test_a_chunked_selection_keeps_as_much_importance_as_the_exact_one(
    config, dtype, elements, monkeypatch
):
    monkeypatch.setattr("nsa.attention.span.ELEMENTS", elements)
    drawn = draw(Case(300, group=3, batch=2, config=config), dtype, DEVICE)
    args, kwargs = drawn.to(torch.float64).arguments()
    exact = nsa(*args, **kwargs)
    (q, k, _, _, _), kwargs = drawn.arguments()
    blocks = select_blocks(q, compress_keys(k["cmp"], kwargs["phi"], config), config, 16**-0.5)
    assert blocks.dtype == torch.int32 and blocks.shape == exact.blocks.shape

    def kept(chosen):
        weight = exact.importance.gather(-1, chosen.long().clamp(min=0))
        return weight.masked_fill(chosen < 0, 0.0).sum(-1)

    assert torch.equal((blocks < 0).sum(-1), (exact.blocks < 0).sum(-1))
    loss = kept(exact.blocks) - kept(blocks)
    assert loss.abs().max() <= 3 * torch.finfo(dtype).eps * exact.importance.sum(-1).max()


WHOLE = [
    Case(70, batch=3, group=3, dim=8, value_dim=6),
    Case(70, group=2, phi="mlp", packed=(1, 40, 29), compress_rope=True),
    Case(90, kv_heads=1, group=4, config=ODD, phi="linear", shared=True, batch=2),
]


@pytest.mark.full
@pytest.mark.skipif(DEVICE != "cpu", reason="float64 on a CPU")
@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.parametrize("backend", [name for name in NAMES if takes(name, torch.float64)])
def test_backend_selects_and_attends_as_the_reference_from_end_to_end(backend, case):
    drawn = draw(case)
    args, kwargs = drawn.arguments()
    want = nsa(*args, **kwargs, scale=0.3).o
    with torch.no_grad():
        got = nsa_attention(*args, **kwargs, scale=0.3, backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("backend", [name for name in FAST if name != "triton"])
def test_longer_than_one_chunk_of_queries(backend, monkeypatch):
    """Small chunks on a small shape take the same path as real ones on a long sequence. Triton's
    kernels have none: what is changed here changes nothing for them."""
    monkeypatch.setitem(gather.ELEMENTS, DEVICE, 1)
    monkeypatch.setattr("nsa.attention.backends.packed.ELEMENTS", 1)
    monkeypatch.setattr("nsa.attention.span.ELEMENTS", 20_000)
    check(backend, replace(CASES[8], batch=2), torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("branch", ["slc", "win"])
def test_the_kernels_dq_does_not_feel_what_all_values_share(branch):
    """Softmax does not see it, so it must not cost what it does see its digits.

    The selected branch's delta is of an output that was rounded with it, as FlashAttention's is:
    there it costs less than it costs plain torch.
    """

    def error(offset, name="triton"):
        torch.manual_seed(0)
        drawn = draw(Case(100, kv_heads=1, group=2, config=SMALL), torch.float16, DEVICE)
        with torch.no_grad():
            drawn.leaves[f"v_{branch}"] += offset
        args, kwargs = drawn.to(torch.float64).arguments()
        drawn.blocks = nsa(*args, **kwargs).blocks
        do = torch.randn_like(args[0]).half()
        ours, truth = (
            outcome(lambda x, name=name: attend(x, name, branches=(branch,)), given, do)[1]["q"]
            for name, given in ((name, drawn), ("masked", drawn.to(torch.float64)))
        )
        return float((ours - truth).abs().mean())

    allowed = 3 * error(offset=0.0) if branch == "win" else error(30.0, "masked")
    assert error(offset=30.0) <= allowed
