"""The call on [TOTAL, H, D] as flash-attn's users know it: a thin door to `nsa_attention`."""

import inspect

import pytest
import torch
from cases import Case, draw

from nsa import nsa_attention, nsa_varlen_func

CASES = [
    Case(30, packed=(7, 1, 22)),
    Case(30, group=3, value_dim=48, packed=(30,), shared=True, sinks="heads"),
    Case(41, phi="mlp", packed=(5, 36), sinks="branches"),
]
# flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...)
THEIRS = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]


def flat(x):
    return {b: one[0] for b, one in x.items()} if isinstance(x, dict) else x[0]


def given(case, **changes):
    """(arguments as flash-attn has them, gates and config, options), some of them changed."""
    drawn = draw(case, torch.float32)
    (*qkv, gates, config), options = drawn.arguments()
    cu, longest = options.pop("cu_seqlens"), max(case.packed)
    values = [*map(flat, qkv), cu, cu, longest, longest]
    named = dict(zip(THEIRS, values, strict=True)) | {"gates": gates[0], "config": config}
    return drawn, named | options | changes


def test_its_first_arguments_are_flash_attns():
    assert list(inspect.signature(nsa_varlen_func).parameters)[:7] == THEIRS


@pytest.mark.parametrize("backend", ["gather", "packed", "masked", "sdpa"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_packed_call_to_the_bit(case, backend):
    drawn, options = given(case, backend=backend)
    args, theirs = drawn.arguments()
    want = nsa_attention(*args, **theirs, backend=backend, return_lse=True)
    plain, got = nsa_varlen_func(**options), nsa_varlen_func(**options, return_lse=True)
    assert torch.equal(plain, got[0])
    assert [x.shape for x in got] == [x.shape[1:] for x in want]
    assert all(torch.equal(x, y[0]) for x, y in zip(got, want, strict=True))
    leaves = list(drawn.leaves.values())
    mine, other = (torch.autograd.grad(x.square().sum(), leaves) for x in (plain, want[0]))
    assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))


def test_scale_and_a_selection_go_through():
    drawn, options = given(CASES[0], backend="masked", softmax_scale=0.7)
    blocks = torch.zeros(30, 2, 1, dtype=torch.int32)
    args, theirs = drawn.arguments()
    theirs |= {"blocks": blocks[None], "scale": 0.7, "backend": "masked"}
    options["blocks"] = blocks
    assert torch.equal(nsa_varlen_func(**options), nsa_attention(*args, **theirs)[0])


def test_equal_lengths_in_two_tensors_will_do():
    _, options = given(CASES[0], backend="masked")
    want = nsa_varlen_func(**options)
    options["cu_seqlens_k"] = options["cu_seqlens_k"].long()
    assert torch.equal(nsa_varlen_func(**options), want)


def bounds(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("q_start", [None, torch.tensor([1, 0, 6])])
def test_fewer_queries_than_keys_are_the_newest_unless_told(q_start):
    case = CASES[0]
    _, options = given(case, backend="masked", return_lse=True)
    chosen = [slice(4, 7), slice(7, 7), slice(20, 30)]  # of 7, 1 and 22 keys
    if q_start is not None:
        chosen = [slice(1, 4), slice(7, 7), slice(14, 24)]
        options["q_start"] = q_start
    whole = nsa_varlen_func(**options | {"q_start": torch.zeros(3).int()})
    for name in ("q", "gates"):
        options[name] = torch.cat([options[name][rows] for rows in chosen])
    options |= {"cu_seqlens_q": bounds(0, 3, 3, 13), "max_seqlen_q": 10}
    for part, all_rows in zip(nsa_varlen_func(**options), whole, strict=True):
        want = torch.cat([all_rows[rows] for rows in chosen])
        assert torch.allclose(part, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": False}, "no query of NSA sees a later key; causal=True would do"),
        (
            {"max_seqlen_k": 21},
            "max_seqlen_q=22 and max_seqlen_k=21: a sequence has a key for each",
        ),
        ({"cu_seqlens_k": bounds(0, 8, 9, 30)}, "sequence 2 has 21 keys .* needs a key for each"),
        ({"cu_seqlens_k": bounds(0, 30)}, "cu_seqlens_q has 4 entries and cu_seqlens 2"),
        (
            {"cu_seqlens_k": [0, 30]},
            r"cu_seqlens_k is a list and must be a tensor \[N \+ 1\] int32",
        ),
        (
            {"q": torch.ones(1, 30, 4, 16)},
            r"q must be \[TOTAL, HQ, D\].* got shape \(1, 30, 4, 16\)",
        ),
        ({"v": torch.ones(31, 2, 16)}, "q has T=30 and v has T=31"),
        ({"k": torch.ones(31, 2, 16)}, "q has T=30 and k has T=31"),
        ({"gates": None}, r"gates is a NoneType and must be a tensor \[TOTAL, HQ, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    _, options = given(CASES[0], backend="masked")
    with pytest.raises(ValueError, match=message):
        nsa_varlen_func(**options | changes)
