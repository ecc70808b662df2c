"""Bad input: each kind is refused before anything runs, with what it got and what would do."""

from dataclasses import replace

import pytest
import torch
from cases import TINY, Case, draw

from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig


@pytest.fixture
def call():
    """Calls nsa_attention on a good shape with some arguments replaced."""
    args, kwargs = draw(Case(20), torch.float32).arguments()
    names = ("q", "k", "v", "gates", "config")

    def run(**changes):
        given = dict(zip(names, args, strict=True)) | kwargs | {"backend": "masked"} | changes
        return nsa_attention(**given)

    run.good = dict(zip(names, args, strict=True))
    return run


def test_the_good_call_is_good(call):
    assert call().shape == (1, 20, 4, 16)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (
            {"compress_block": 40},
            "compress_block=40 is not a multiple of compress_stride=16; "
            "nearest that are: 32 and 48",
        ),
        ({"select_block": 72}, "select_block=72 is not a multiple .* 64 and 80"),
        ({"compress_block": 8, "compress_stride": 16}, "nearest that are: 16$"),
        ({"compress_block": 72}, "nearest that are: 64$"),
        ({"compress_block": 128}, "compress_block=128 is larger than select_block=64"),
        ({"select_count": 2}, "select_count=2 has no room .* at least 3"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"compress_stride": -16}, "compress_stride=-16 must be at least 1"),
        ({"select_initial": -1}, "select_initial=-1 must be at least 0"),
        ({"select_local": 0}, "select_local=0 must be at least 1: a query's own block"),
    ],
)
def test_illegal_sizes_are_refused_with_the_nearest_legal_ones(sizes, message):
    with pytest.raises(ValueError, match=message):
        NSAConfig(**sizes)


@pytest.mark.parametrize("value", [32.0, "32", True, None])
def test_a_size_that_is_not_an_int_is_refused(value):
    with pytest.raises(TypeError, match="compress_block"):
        NSAConfig(compress_block=value)


def test_query_heads_must_be_a_multiple_of_kv_heads(call):
    q = torch.randn(1, 20, 5, 16)
    with pytest.raises(
        ValueError, match=r"HQ=5 .* not a multiple of HKV=2; nearest that are: 4 and 6"
    ):
        call(q=q, gates=torch.rand(1, 20, 5, 3))


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("q", (20, 4, 16), r"q must be \[B, T, HQ, D\], got shape \(20, 4, 16\)"),
        ("q", (1, 0, 4, 16), "at least one sequence and one token"),
        ("q", (0, 20, 4, 16), "at least one sequence and one token"),
        ("gates", (1, 20, 4), r"gates must be .* \(1, 20, 4, 3\), got \(1, 20, 4\)"),
        ("gates", (1, 20, 2, 3), "gates must be"),
        ("k", (1, 19, 2, 16), r"k\['cmp'\] has shape \(1, 19, 2, 16\), wanted \(1, 20, 2, 16\)"),
        ("k", (1, 20, 2, 8), "wanted"),
        ("k", (20, 2, 16), "wanted"),
        ("v", (2, 20, 2, 16), r"v\['cmp'\] has shape"),
        ("v", (1, 20, 1, 16), "k has 2 KV heads and v has 1"),
        ("v", (1, 20, 2, 0), "has shape"),
    ],
)
def test_wrong_shapes_are_refused(call, name, shape, message):
    with pytest.raises(ValueError, match=message):
        call(**{name: torch.randn(shape)})


def test_wrong_dtypes_are_refused(call):
    with pytest.raises(ValueError, match=r"q has dtype torch.int32; these would do: torch.float32"):
        call(q=torch.ones(1, 20, 4, 16, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"k\['cmp'\] is torch.bfloat16 and q is torch.float32"):
        call(k=torch.randn(1, 20, 2, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=" be floating point"):
        call(gates=torch.ones(1, 20, 4, 3, dtype=torch.int64))


@pytest.mark.parametrize("name", ["k", "v", "gates"])
def test_mixed_devices_are_refused(call, name):
    shape = (1, 20, 4, 3) if name == "gates" else (1, 20, 2, 16)
    with pytest.raises(ValueError, match="on meta and q on cpu; put them on one device"):
        call(**{name: torch.empty(shape, device="meta")})


def test_a_missing_branch_is_named(call):
    k = {b: x for b, x in call.good["k"].items() if b != "cmp"}
    with pytest.raises(ValueError, match=r"k has no entry for cmp; it has \['slc', 'win'\]"):
        call(k=k)
    assert call(k=k, branches=("win",)).shape == (1, 20, 4, 16)  # nobody needs it there


def test_unknown_branches_are_refused(call):
    with pytest.raises(ValueError, match=r"\('sel',\); choose at least one of \('cmp', 'slc'"):
        call(branches="sel")
    with pytest.raises(ValueError, match="choose at least one"):
        call(branches=())


def test_an_unknown_backend_is_refused_with_the_nearest_name(call):
    with pytest.raises(ValueError, match=r"'gathr' is unknown; .*the nearest is 'gather'"):
        call(backend="gathr")
    with pytest.raises(ValueError, match="'auto' is a choice between backends"):
        registry.get("auto")


@pytest.mark.parametrize(
    "bounds, message",
    [
        ([0, 12, 7, 20], r"cu_seqlens=\[0, 12, 7, 20\] must rise from 0 to T=20"),
        ([1, 20], "must rise from 0"),
        ([0, 19], "to T=20"),
        ([0], "one entry more"),
    ],
)
def test_cu_seqlens_that_do_not_rise_from_0_to_t_are_refused(call, bounds, message):
    with pytest.raises(ValueError, match=message):
        call(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def test_cu_seqlens_of_another_kind_are_refused(call):
    with pytest.raises(ValueError, match=r"one-dimensional int32 or int64, got torch.float32"):
        call(cu_seqlens=torch.tensor([0.0, 20.0]))
    args, _ = draw(Case(20, batch=2), torch.float32).arguments()
    with pytest.raises(ValueError, match="packed sequences need B=1, got B=2"):
        nsa_attention(*args, cu_seqlens=torch.tensor([0, 20], dtype=torch.int32))


def test_a_selection_of_another_shape_or_dtype_is_refused(call):
    with pytest.raises(ValueError, match=r"blocks must be \(1, 20, 2\) \+ \(N,\)"):
        call(blocks=torch.zeros(1, 20, 4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"int32 or int64, got torch.float32"):
        call(blocks=torch.zeros(1, 20, 2, 4))


@pytest.mark.parametrize(
    "row, message",
    [
        ([0, 3, -1, -1], r"from -1 to 3; legal are 0\.\.2"),
        ([-2, 0, 1, 2], "from -2 to 2"),
        ([0, 1, 1, -1], "ascending without duplicates"),
        ([1, 0, -1, -1], "ascending without duplicates"),
        ([-1, 0, 1, 2], "ascending without duplicates, with the empty slots last"),
    ],
)
def test_strict_mode_looks_at_a_callers_selection(call, row, message):
    blocks = torch.tensor(row, dtype=torch.int32).expand(1, 20, 2, 4)
    with pytest.raises(ValueError, match=message):
        call(blocks=blocks, strict=True)


def test_strict_mode_lets_a_good_selection_through(call):
    blocks = torch.tensor([0, 2, -1, -1], dtype=torch.int32).expand(1, 20, 2, 4)
    assert torch.equal(call(blocks=blocks, strict=True), call(blocks=blocks))


def test_a_config_cannot_be_changed_into_an_illegal_one():
    with pytest.raises(ValueError, match="no room"):
        replace(TINY, select_count=1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": torch.randn(1, 20, 4, 0)}, "head and dimension"),
        ({"q": torch.randn(1, 20, 0, 16), "gates": torch.rand(1, 20, 0, 3)}, "head and dimension"),
        ({"scale": float("nan")}, "scale=nan must be finite"),
        ({"cu_seqlens": [0, 20]}, "must be an int32 tensor, got a list"),
    ],
)
def test_what_would_end_in_somebody_elses_error_is_refused(call, changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_branches_may_come_from_anywhere(call):
    assert call(branches=(b for b in ("win",))).shape == (1, 20, 4, 16)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("position", torch.randn(2, 1, 16), r"phi.key.position must be \(2, 4, 16\) for mlp"),
        ("weight1", torch.randn(1, 64, 24), r"phi.key.weight1 must be \(2, 64, 24\)"),
        ("bias1", None, "phi.key.bias1 must be .* got None"),
        ("weight2", torch.randn(2, 24, 8), "phi.key.weight2 must be"),
        ("bias2", torch.randn(2, 16, dtype=torch.float64), "phi.key.bias2 is torch.float64"),
    ],
)
def test_weights_of_phi_that_do_not_fit_are_refused(name, value, message):
    args, kwargs = draw(Case(20, phi="mlp"), torch.float32).arguments()
    phi = replace(kwargs["phi"], key=replace(kwargs["phi"].key, **{name: value}))
    with pytest.raises(ValueError, match=message):
        nsa_attention(*args, phi=phi)


def test_rotary_tables_that_are_too_short_or_too_narrow_are_refused():
    args, kwargs = draw(Case(20, compress_rope=True), torch.float32).arguments()
    cos, sin = kwargs["phi"].rotary
    with pytest.raises(ValueError, match=r"at least 17 positions x 8, got \(16, 8\)"):
        nsa_attention(*args, phi=replace(kwargs["phi"], rotary=(cos[:16], sin[:16])))
    with pytest.raises(ValueError, match=r"got \(20, 1\)"):
        nsa_attention(*args, phi=replace(kwargs["phi"], rotary=(cos[:, :1], sin[:, :1])))


def test_strict_mode_checks_a_selection_sequence_by_sequence(call):
    bounds = torch.tensor([0, 10, 20], dtype=torch.int32)
    blocks = torch.tensor([0, 2, -1, -1], dtype=torch.int32).expand(1, 20, 2, 4)
    with pytest.raises(ValueError, match=r"from -1 to 2; legal are 0\.\.1"):
        call(blocks=blocks, cu_seqlens=bounds, strict=True)
