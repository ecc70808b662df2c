"""Bad input: each kind is refused before anything runs, with what it got and what would do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import TINY, Case, draw, of
from tiny_models import tiny

from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.attention.inputs import checked
from nsa.config import NSAConfig


@pytest.fixture
def call():
    """Calls nsa_attention on a good shape with some arguments replaced."""
    args, kwargs = draw(Case(20), torch.float32).arguments()
    good = dict(zip(("q", "k", "v", "gates", "config"), args, strict=True))

    def run(**changes):
        return nsa_attention(**(good | kwargs | {"backend": "masked"} | changes))

    run.good = good
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


def test_a_size_may_be_an_int_of_numpys_and_is_kept_as_pythons():
    config = NSAConfig(window=np.int64(8), compress_block=np.uint8(16))
    assert config == NSAConfig(window=8, compress_block=16)
    assert type(config.window) is type(config.compress_block) is int


def test_a_config_cannot_be_changed_into_an_illegal_one():
    with pytest.raises(ValueError, match="no room"):
        replace(TINY, select_count=1)


def bounds(*values, dtype=torch.int32):
    return {"cu_seqlens": torch.tensor(values, dtype=dtype)}


def selection(*row):
    return {"blocks": torch.tensor(row, dtype=torch.int32).expand(1, 20, 2, 4)}


TWO = {"q": of(2, 20, 4, 16), "k": of(2, 20, 2, 16), "v": of(2, 20, 2, 16)}
ELSEWHERE = "on meta and q on cpu; put them on one device"
REFUSED = [
    # shapes
    (
        {"q": of(1, 20, 5, 16), "gates": of(1, 20, 5, 3)},
        r"HQ=5 .* not a multiple of HKV=2; nearest that are: 4 and 6",
    ),
    ({"q": of(20, 4, 16)}, r"q must be \[B, T, HQ, D\], got shape \(20, 4, 16\)"),
    ({"q": of(1, 0, 4, 16)}, "at least one sequence and one token"),
    ({"q": of(0, 20, 4, 16)}, "at least one sequence and one token"),
    ({"q": of(1, 20, 4, 0)}, "head and dimension"),
    ({"q": of(1, 20, 0, 16), "gates": of(1, 20, 0, 3)}, "head and dimension"),
    ({"gates": of(1, 20, 4)}, r"gates must be .* \(1, 20, 4, 3\), got \(1, 20, 4\)"),
    ({"gates": of(1, 20, 2, 3)}, "gates must be"),
    ({"k": of(1, 19, 2, 16)}, r"q has T=20 and k has T=19: without q_start query t stands"),
    ({"q": of(1, 1, 4, 16)}, "T=1 and k has T=20: without .*; q_start=19 makes .* nsa_decode"),
    ({"q": of(1, 4, 20, 16), "k": of(1, 2, 20, 16)}, r"\[B, H, T, D\] transpose\(1, 2\) makes"),
    ({"k": of(1, 20, 2, 8)}, r"k\['cmp'\] has shape \(1, 20, 2, 8\), wanted \(1, 20, 2, 16\)"),
    # what is no tensor
    (
        {"gates": None},
        r"gates is a NoneType and must be a tensor \[B, T, HQ, 3\]",
    ),
    ({"gates": 0.5}, "gates is a float .* weighs the branches alike"),
    ({"v": None}, "v is a NoneType and must be a tensor or a mapping with one for each"),
    ({"q": None}, r"q is a NoneType and must be a tensor \[B, T, HQ, D\]"),
    ({"config": None}, "config must be an NSAConfig, got a NoneType"),
    ({"config": tiny()}, r"got a nsa.model.config.ModelConfig; config.nsa is one"),
    ({"k": of(20, 2, 16)}, "wanted"),
    ({"v": of(2, 20, 2, 16)}, r"v\['cmp'\] has shape"),
    ({"v": of(1, 20, 1, 16)}, "k has 2 KV heads and v has 1"),
    ({"v": of(1, 20, 2, 0)}, "has shape"),
    ({"blocks": of(1, 20, 4, 4, dtype=torch.int32)}, r"blocks must be \(1, 20, 2\) \+ \(N,\)"),
    # dtypes and devices
    (
        {"q": of(1, 20, 4, 16, dtype=torch.int32)},
        r"q has dtype torch.int32; these would do: torch.float32",
    ),
    (
        {"k": of(1, 20, 2, 16, dtype=torch.bfloat16)},
        r"k\['cmp'\] is torch.bfloat16 and q is torch.float32",
    ),
    ({"gates": of(1, 20, 4, 3, dtype=torch.int64)}, " be floating point"),
    ({"blocks": of(1, 20, 2, 4)}, r"int32 or int64, got torch.float32"),
    ({"k": of(1, 20, 2, 16, device="meta")}, ELSEWHERE),
    ({"v": of(1, 20, 2, 16, device="meta")}, ELSEWHERE),
    ({"gates": of(1, 20, 4, 3, device="meta")}, ELSEWHERE),
    # names and numbers
    ({"branches": "sel"}, r"\('sel',\); choose at least one of \('cmp', 'slc'"),
    ({"branches": ()}, "choose at least one"),
    ({"backend": "gathr"}, r"'gathr' is unknown; .*the nearest is 'gather'"),
    ({"scale": float("nan")}, "scale=nan must be finite"),
    # packed sequences
    (bounds(0, 12, 7, 20), r"cu_seqlens=\[0, 12, 7, 20\] must rise from 0 to T=20"),
    (bounds(1, 20), "must rise from 0"),
    (bounds(0, 19), "to T=20"),
    (bounds(0), "one entry more"),
    (bounds(0.0, 20.0, dtype=None), r"one-dimensional int32 or int64, got torch.float32"),
    ({"cu_seqlens": [0, 20]}, "must be an int32 tensor, got a list"),
    (bounds(0, 20) | TWO | {"gates": of(2, 20, 4, 3)}, "packed sequences need B=1, got B=2"),
    # what strict mode sees of a caller's selection
    (selection(0, 3, -1, -1) | {"strict": True}, r"from -1 to 3; legal are 0\.\.2"),
    (selection(-2, 0, 1, 2) | {"strict": True}, "from -2 to 2"),
    (selection(0, 1, 1, -1) | {"strict": True}, "ascending without duplicates"),
    (selection(1, 0, -1, -1) | {"strict": True}, "ascending without duplicates"),
    (
        selection(-1, 0, 1, 2) | {"strict": True},
        "ascending without duplicates, with the empty slots last",
    ),
    (
        selection(0, 2, -1, -1) | bounds(0, 10, 20) | {"strict": True},
        r"from -1 to 2; legal are 0\.\.1",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_does_not_fit_is_refused_with_what_would_do(call, changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize("borders", [(0, 0, 12, 20), (0, 12, 12, 20), (0, 12, 20, 20)])
def test_an_empty_sequence_in_a_pack_changes_nothing(call, borders):
    assert torch.equal(call(**bounds(*borders)), call(**bounds(0, 12, 20)))
    apart = checked(**call.good, **bounds(*borders)).sequences()  # and no backend is handed it
    assert [one.q.shape[1] for one in apart] == [12, 8]


def test_auto_is_no_backend_to_get():
    with pytest.raises(ValueError, match="'auto' is a choice between backends"):
        registry.get("auto")


def test_a_missing_branch_is_named(call):
    k = {b: x for b, x in call.good["k"].items() if b != "cmp"}
    with pytest.raises(ValueError, match=r"k has no entry for cmp; it has \['slc', 'win'\]"):
        call(k=k)
    assert call(k=k, branches=("win",)).shape == (1, 20, 4, 16)  # nobody needs it there


def test_strict_mode_lets_a_good_selection_through(call):
    assert torch.equal(
        call(**selection(0, 2, -1, -1), strict=True), call(**selection(0, 2, -1, -1))
    )


def test_branches_may_come_from_anywhere(call):
    assert call(branches=(b for b in ("win",))).shape == (1, 20, 4, 16)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("position", of(2, 1, 16), r"phi.key.position must be \(2, 4, 16\) for mlp"),
        ("weight1", of(1, 64, 24), r"phi.key.weight1 must be \(2, 64, 24\)"),
        ("bias1", None, "phi.key.bias1 must be .* got None"),
        ("weight2", of(2, 24, 8), "phi.key.weight2 must be"),
        ("bias2", of(2, 16, dtype=torch.float64), "phi.key.bias2 is torch.float64"),
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
