"""flash: regrouping, window and padding with torch in flash-attn's place; and what it declines.

On a GPU that has flash-attn the same shapes run through it.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from backend_calls import DEVICE, attend, check, refuses_a_second_derivative
from cases import CASES, EVEN, ODD, SMALL, TINY, Case, draw

from nsa.attention import dense, registry, witness
from nsa.attention.backends import flash, triton
from nsa.blocks import compressed_span, count_compressed
from nsa.config import NSAConfig


def softmax_attention(q, k, v, softmax_scale, causal, window_size, deterministic):
    """flash-attn as documented: head h reads KV head h // G; t sees s in t - left .. t + right."""
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
    check("flash", case, torch.float32)


@pytest.mark.skipif(DEVICE != "cpu", reason="float64 on a CPU")
def test_gradcheck(stand_in):
    config = NSAConfig(4, 2, 4, 2, select_initial=0, window=3)
    drawn = draw(Case(12, group=2, dim=2, value_dim=3, config=config, phi="linear"))
    assert drawn.has_the_gradients_of(lambda x: attend(x, "flash"))


@pytest.mark.parametrize("tokens", [*range(10, 18), 40])
@pytest.mark.parametrize("config", [TINY, EVEN, ODD], ids=["tiny", "even", "odd"])
def test_queries_of_one_position_see_the_same_compressed_keys(config, tokens):
    """Token t, wherever regrouping puts it, has the number of keys that it sees as its position."""
    count = count_compressed(tokens, config)
    if count == 0:
        pytest.skip("no compressed key")
    heads, kv_heads = 6, 2
    marked = torch.arange(tokens * heads).view(1, tokens, heads, 1) + 1
    grouped = flash.regroup(marked, config, count, kv_heads)
    assert grouped.shape == (1, count, heads * config.compress_stride, 1)
    per_kv_head, seen = grouped.shape[2] // kv_heads, 0
    for a, h in product(range(count), range(grouped.shape[2])):
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
        return torch.zeros_like(inputs.q), None

    monkeypatch.setattr(triton, "why_not", lambda inputs: [])
    monkeypatch.setattr(triton, "select_blocks", lambda inputs, k_cmp: blocks)
    monkeypatch.setattr(triton, "selected", selected)
    with witness.recording() as seen:
        got = attend(drawn, "flash")
        attend(drawn, "flash", blocks=blocks + 1)
    assert seen.paths["score", "triton"] == 1 and seen.paths["slc", "triton"] == 2
    assert handed[0] is blocks and torch.equal(handed[1], blocks + 1)
    assert attend(drawn, "flash", return_blocks=True)[1] is blocks
    only = attend(drawn, "flash", branches=("cmp", "win"))
    torch.testing.assert_close(got, only)
    assert not torch.allclose(got, want)


@pytest.mark.parametrize("branch", ["cmp", "win"])
def test_a_second_derivative_is_refused_rather_than_wrong(stand_in, branch):
    refuses_a_second_derivative("flash", branch)


@pytest.fixture
def asked(monkeypatch):
    """Arguments to a library that takes head dims from 64 on: (q, k and v, keywords)."""
    calls = []

    def attend_(*qkv, **options):
        calls.append((qkv, options))
        return qkv[2]

    library = dense.Library("fa4", attend_, open_left=None, smallest=64)
    monkeypatch.setattr(dense, "library_for", lambda capability: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return calls


def test_deterministic_algorithms_ask_for_the_deterministic_backward(asked, monkeypatch):
    x = torch.zeros(1, 3, 1, 8)
    for on in (True, False):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda on=on: on)
        dense.dense_attention(x, x, x, scale=1.0)
    assert [options["deterministic"] for _, options in asked] == [True, False]


def test_heads_narrower_than_a_library_takes_are_padded(asked):
    q, wide = torch.zeros(1, 3, 2, 16), torch.zeros(1, 3, 2, 72)
    o, _ = dense.dense_attention(q, q, q[..., :10], scale=1.0)
    dense.dense_attention(wide, wide, q, scale=1.0)
    assert [{x.shape[3] for x in qkv} for qkv, _ in asked] == [{64}, {72}] and o.shape[3] == 10


def why_not(*, dtype=torch.bfloat16, dim=64, scale=1.0):
    """Reasons of flash-attn against a q that claims to be on a GPU."""
    q = SimpleNamespace(dtype=dtype, shape=(1, 8, 2, dim), is_cuda=True, device="cuda:0")
    return dense.why_not(q, 64, scale)


@pytest.fixture
def gpu(monkeypatch):
    """Claims a GPU of that compute capability, and that those distributions are installed."""

    def claim(capability, *distributions):
        dense.library_for.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
        monkeypatch.setattr(dense, "_installed", lambda name: name in distributions)
        for name, library in LIBRARIES.items():
            monkeypatch.setattr(dense, f"_{name}", lambda capability, found=library: found)

    yield claim
    dense.library_for.cache_clear()


BOTH = "flash-attn-4", "flash-attn"


@pytest.mark.parametrize(
    ("capability", "installed", "told"),
    [
        ((9, 0), BOTH, "fa4"),
        ((9, 0), BOTH[1:], "fa2"),
        ((8, 9), BOTH, "fa2"),
        ((10, 0), BOTH[:1], "fa4"),
        ((9, 0), (), "not installed; FlashAttention-4: pip install 'nsa[flash-attn]'"),
        ((8, 0), (), "FlashAttention-2: pip install flash-attn --no-build-isolation"),
        ((8, 0), BOTH[:1], "FlashAttention-2: pip install flash-attn"),
        ((7, 5), BOTH[1:], "needs compute capability 8.0 (Ampere) or newer, got (7, 5)"),
    ],
)
def test_the_newest_generation_that_serves_the_gpu_or_what_to_install(
    gpu, capability, installed, told
):
    gpu(capability, *installed)
    if told in LIBRARIES:
        assert dense.library_for(capability).name == told and why_not() == []
    else:
        (why,) = why_not()
        assert told in why


def test_a_library_that_does_not_import_declines_with_its_error(monkeypatch, gpu):
    def broken(capability):
        raise OSError("undefined symbol: nothing")

    gpu((9, 0), "flash-attn-4")
    monkeypatch.setattr(dense, "_fa4", broken)
    (why,) = why_not()
    assert why == "flash-attn-4 is installed and does not import: undefined symbol: nothing"


def test_it_declines_what_flash_attn_does_not_take(monkeypatch, gpu):
    gpu((9, 0), "flash-attn-4")
    assert "bf16 or fp16, got torch.float32" in why_not(dtype=torch.float32)[0]
    assert "at most 256 on a GPU, got 264 and 64" in why_not(dim=264)[0]
    assert "positive scale, got -1.0" in why_not(scale=-1.0)[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert why_not() == ["torch.compile cannot trace flash-attn"]


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
    check("flash", case, dtype)
