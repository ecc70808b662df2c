"""flash: regrouping, window and padding with torch in flash-attn's place; and what it declines.

On a GPU that has flash-attn the same shapes run through it.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from backend_calls import DEVICE, attend, check
from cases import CASES, EVEN, ODD, SMALL, TINY, Case, draw

from nsa.attention import dense, registry, witness
from nsa.attention.backends import flash, triton
from nsa.config import NSAConfig


def softmax_attention(q, k, v, softmax_scale, causal, window_size, deterministic):
    """What flash-attn documents: head h reads KV head h // G; t sees s in t - left .. t + right."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    assert q.shape[1] == k.shape[1] and causal and window_size[1] == 0
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bthd,bshd->bhts", q.to(wide), k.to(wide)) * softmax_scale
    age = torch.arange(q.shape[1], device=q.device)[:, None]
    age = age - torch.arange(k.shape[1], device=q.device)
    hidden = age < 0
    if window_size[0] not in (None, -1):
        hidden |= age > window_size[0]
    probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", probs, v.to(wide)).to(q.dtype)


LIBRARIES = {
    "fa4": dense.Library("fa4", lambda *x, **y: (softmax_attention(*x, **y), None), open_left=None),
    "fa2": dense.Library("fa2", softmax_attention, open_left=-1),
}


@pytest.fixture(params=LIBRARIES)
def stand_in(request, monkeypatch):
    """torch in the place of flash-attn, and nothing in that of our kernels."""
    willing = replace(flash.BACKEND, why_not=lambda inputs: [])
    plain = registry.get
    monkeypatch.setattr(registry, "get", lambda n: willing if n == "flash" else plain(n))
    monkeypatch.setattr(dense, "library_for", lambda capability: LIBRARIES[request.param])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton, "why_not", lambda inputs: ["left out"])
    return request.param


@pytest.mark.parametrize("case", CASES, ids=str)
def test_regrouped_and_windowed_it_agrees_with_the_reference(stand_in, case):
    check("flash", case, torch.float32, with_gradient=True)


@pytest.mark.skipif(DEVICE != "cpu", reason="float64 on a CPU")
def test_gradcheck(stand_in):
    config = NSAConfig(4, 2, 4, 2, select_initial=0, window=3)
    drawn = draw(Case(12, group=2, dim=2, value_dim=3, config=config, phi="linear"))
    names = list(drawn.leaves)

    def f(*leaves):
        drawn.leaves = dict(zip(names, leaves, strict=True))
        return attend(drawn, "flash")

    assert torch.autograd.gradcheck(f, tuple(drawn.leaves.values()), fast_mode=True)


@pytest.mark.parametrize("tokens", [*range(10, 18), 40])
@pytest.mark.parametrize("config", [TINY, EVEN, ODD], ids=["tiny", "even", "odd"])
def test_queries_of_one_position_see_the_same_compressed_keys(config, tokens):
    """Token t, wherever regrouping puts it, has the number of keys that it sees as its position."""
    from nsa.blocks import compressed_span, count_compressed

    count = count_compressed(tokens, config)
    if count == 0:
        pytest.skip("no compressed key")
    heads, kv_heads = 6, 2
    marked = torch.arange(tokens * heads).view(1, tokens, heads, 1) + 1
    grouped = flash.regroup(marked, config, count, kv_heads)
    assert grouped.shape == (1, count, heads * config.compress_stride, 1)
    per_kv_head = grouped.shape[2] // kv_heads
    seen = 0
    for a in range(count):
        for h in range(grouped.shape[2]):
            if grouped[0, a, h, 0]:
                t, head = divmod(int(grouped[0, a, h, 0]) - 1, heads)
                assert compressed_span(config).seen(t) == (0, a + 1)
                assert head // (heads // kv_heads) == h // per_kv_head
                seen += 1
    assert seen == (tokens - config.compress_block + 1) * heads
    back = flash.ungroup(grouped, config, tokens, kv_heads)
    first = config.compress_block - 1
    assert torch.equal(back[:, first:], marked[:, first:]) and not back[:, :first].any()


def test_the_witness_names_the_library_and_what_was_regrouped(stand_in):
    drawn = draw(Case(40, config=SMALL), torch.float32, DEVICE)
    with witness.recording() as seen:
        attend(drawn, "flash")
    paths = seen.record()["paths"]
    assert paths["cmp"] == {f"{stand_in}-regrouped": 1} and paths["win"] == {stand_in: 1}
    assert paths["slc"] == {"packed-tiles": 1} and paths["score"] == {"score-chunks": 1}


def test_scores_and_the_selected_branch_are_our_kernels_where_those_run(stand_in, monkeypatch):
    drawn = draw(Case(40), torch.float32, DEVICE)
    want = attend(drawn, "flash")
    blocks = torch.zeros(1, 40, 2, 4, dtype=torch.int32, device=DEVICE)
    handed = []

    def selected(inputs, given, note):
        handed.append(given)
        note("slc", "triton")
        return torch.zeros_like(inputs.q)

    monkeypatch.setattr(triton, "why_not", lambda inputs: [])
    monkeypatch.setattr(triton, "select_blocks", lambda inputs, k_cmp: blocks)
    monkeypatch.setattr(triton, "selected", selected)
    with witness.recording() as seen:
        got = attend(drawn, "flash")
        attend(drawn, "flash", blocks=blocks + 1)
    assert seen.paths["score", "triton"] == 1 and seen.paths["slc", "triton"] == 2
    assert handed[0] is blocks and torch.equal(handed[1], blocks + 1)
    only = attend(drawn, "flash", branches=("cmp", "win"))
    torch.testing.assert_close(got, only)
    assert not torch.allclose(got, want)


@pytest.mark.parametrize("branch", ["cmp", "win"])
def test_a_second_derivative_is_refused_rather_than_wrong(stand_in, branch):
    drawn = draw(Case(20), torch.float32, DEVICE)
    o = attend(drawn, "flash", branches=(branch,))
    with pytest.raises(RuntimeError, match=r"no second derivative .*'masked'"):
        torch.autograd.grad(o.square().sum(), drawn.leaves["q"], create_graph=True)


def test_deterministic_algorithms_ask_for_the_deterministic_backward(monkeypatch):
    asked = []

    def attend_(q, k, v, deterministic, **rest):
        asked.append(deterministic)
        return v

    library = dense.Library("fa4", attend_, open_left=None)
    monkeypatch.setattr(dense, "library_for", lambda capability: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    x = torch.zeros(1, 3, 1, 8)
    for on in (True, False):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda on=on: on)
        dense.dense_attention(x, x, x, scale=1.0)
    assert asked == [True, False]


def test_heads_narrower_than_a_library_takes_are_padded(monkeypatch):
    seen = []

    def attend_(q, k, v, **rest):
        seen.append({x.shape[3] for x in (q, k, v)})
        return v

    library = dense.Library("fa4", attend_, open_left=None, smallest=64)
    monkeypatch.setattr(dense, "library_for", lambda capability: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    q, wide = torch.zeros(1, 3, 2, 16), torch.zeros(1, 3, 2, 72)
    o, _ = dense.dense_attention(q, q, q[..., :10], scale=1.0)
    dense.dense_attention(wide, wide, q, scale=1.0)
    assert seen == [{64}, {72}] and o.shape[3] == 10


def claimed(*, dtype=torch.bfloat16, dim=64):
    """A q that claims to be on a GPU, as `why_not` looks at it."""
    return SimpleNamespace(dtype=dtype, shape=(1, 8, 2, dim), is_cuda=True, device="cuda:0")


def only_installed(monkeypatch, *distributions):
    dense.library_for.cache_clear()
    monkeypatch.setattr(dense, "_installed", lambda name: name in distributions)
    monkeypatch.setattr(dense, "_fa4", lambda capability: LIBRARIES["fa4"])
    monkeypatch.setattr(dense, "_fa2", lambda capability: LIBRARIES["fa2"])


@pytest.fixture
def gpu(monkeypatch):
    def claim(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")

    yield claim
    dense.library_for.cache_clear()


@pytest.mark.parametrize(
    "capability, installed, name",
    [
        ((9, 0), ("flash-attn-4", "flash-attn"), "fa4"),
        ((9, 0), ("flash-attn",), "fa2"),
        ((8, 9), ("flash-attn-4", "flash-attn"), "fa2"),
        ((10, 0), ("flash-attn-4",), "fa4"),
    ],
)
def test_the_newest_generation_that_is_installed_and_serves_the_gpu(
    monkeypatch, gpu, capability, installed, name
):
    gpu(*capability)
    only_installed(monkeypatch, *installed)
    assert dense.library_for(capability).name == name
    assert dense.why_not(claimed(), 64, 1.0) == []


@pytest.mark.parametrize(
    "capability, installed, reason",
    [
        ((9, 0), (), "not installed; FlashAttention-4: pip install 'nsa[flash-attn]'"),
        ((8, 0), (), "FlashAttention-2: pip install flash-attn --no-build-isolation"),
        ((8, 0), ("flash-attn-4",), "FlashAttention-2: pip install flash-attn"),
        ((7, 5), ("flash-attn",), "needs compute capability 8.0 (Ampere) or newer, got (7, 5)"),
    ],
)
def test_it_says_what_to_install(monkeypatch, gpu, capability, installed, reason):
    gpu(*capability)
    only_installed(monkeypatch, *installed)
    (why,) = dense.why_not(claimed(), 64, 1.0)
    assert reason in why


def test_a_library_that_does_not_import_declines_with_its_error(monkeypatch, gpu):
    gpu(9, 0)
    only_installed(monkeypatch, "flash-attn-4")

    def broken(capability):
        raise OSError("undefined symbol: nothing")

    monkeypatch.setattr(dense, "_fa4", broken)
    (why,) = dense.why_not(claimed(), 64, 1.0)
    assert why == "flash-attn-4 is installed and does not import: undefined symbol: nothing"


def test_it_declines_what_flash_attn_does_not_take(monkeypatch, gpu):
    gpu(9, 0)
    only_installed(monkeypatch, "flash-attn-4")
    assert (
        "bf16 or fp16, got torch.float32" in dense.why_not(claimed(dtype=torch.float32), 64, 1)[0]
    )
    assert "at most 256 on a GPU, got 264 and 64" in dense.why_not(claimed(dim=264), 64, 1)[0]
    assert "positive scale, got -1.0" in dense.why_not(claimed(), 64, -1.0)[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dense.why_not(claimed(), 64, 1.0) == ["torch.compile cannot trace flash-attn"]


@pytest.mark.skipif(DEVICE != "cpu", reason="says what it declines on a CPU")
def test_without_a_gpu_it_declines_by_name():
    with pytest.raises(registry.Declined, match=r"'flash' does not take .* needs a GPU, got cpu"):
        attend(draw(Case(20), torch.bfloat16), "flash")


def missing() -> str:
    if DEVICE == "cpu":
        return "needs a GPU"
    found = dense.library_for(torch.cuda.get_device_capability())
    return found if isinstance(found, str) else ""


@pytest.mark.gpu
@pytest.mark.skipif(bool(missing()), reason=missing() or "there")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "case",
    [*CASES, Case(700, group=8, kv_heads=1, dim=192, value_dim=128, config=NSAConfig(window=128))],
    ids=str,
)
def test_flash_attn_itself_agrees_with_the_reference(case, dtype):
    check("flash", case, dtype, with_gradient=True)
