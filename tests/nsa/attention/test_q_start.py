"""Queries that begin at an offset of the keys: the tail, or any rows, of the whole call."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from accuracy import assert_as_accurate
from backend_calls import DOUBLE, NAMES, WITH_GRADIENT, exactly_selected, outcome, reference
from cases import EVEN, ODD, SMALL, TINY, Case, draw, of

from nsa import nsa_attention
from nsa.attention import registry
from nsa.attention.api import explain
from nsa.attention.backends import triton
from nsa.attention.inputs import checked
from nsa.reference.compress import compress_keys, compress_values
from nsa.reference.nsa import nsa

# (case, first row of the queries, rows): the newest, one alone, and some with keys after them.
CUTS = [
    (Case(40), 17, 23),
    (Case(41, group=3, batch=2, value_dim=48, phi="mlp"), 40, 1),
    (Case(63, kv_heads=1, config=EVEN, phi="linear", sinks="branches"), 5, 30),
    (Case(70, config=SMALL, shared=True, compress_rope=True, sinks="heads"), 32, 32),
    (Case(90, kv_heads=3, group=1, config=ODD), 61, 20),
    (Case(30), 0, 9),
    (Case(60, packed=(7, 30, 1, 22)), 20, 33),
    (Case(60, packed=(25, 35), phi="mlp", sinks="heads"), 30, 30),
]


def cut(drawn, first, rows):
    """(args, kwargs) of `drawn` with the queries first.. alone."""
    (q, k, v, gates, config), options = drawn.arguments()
    own = slice(first, first + rows)
    if options["blocks"] is not None:
        options["blocks"] = options["blocks"][:, own]
    return (q[:, own], k, v, gates[:, own], config), options


def definition(*args, **options):
    return nsa(*args, **options).o


def by(backend):
    return partial(nsa_attention, backend=backend)


def gradient(case, rows, dtype=torch.float32):
    """dO of that many rows of a case."""
    return torch.randn(case.batch, rows, case.kv_heads * case.group, case.value_dim, dtype=dtype)


def both(drawn, first, rows, do, call=definition):
    """(o, gradients by leaf) of the part by `call`, and of the reference's whole call."""

    def part(drawn):
        args, options = cut(drawn, first, rows)
        return call(*args, **options, q_start=first)

    whole = outcome(lambda x: reference(x)[:, first : first + rows], drawn, do)
    return outcome(part, drawn, do), whole


@pytest.mark.parametrize("case, first, rows", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("handed_in", [False, True])
def test_the_definition_is_the_whole_calls_rows_to_the_bit(case, first, rows, dtype, handed_in):
    drawn = draw(case, dtype)
    if handed_in:
        args, options = drawn.arguments()
        drawn.blocks = nsa(*args, **options).blocks.flip(2)  # not what it would choose
    got, want = both(drawn, first, rows, gradient(case, rows))
    assert torch.equal(got[0], want[0])
    for name, theirs in want[1].items():
        assert torch.equal(got[1][name], theirs), name


@pytest.mark.parametrize("case, first, rows", CUTS, ids=str)
@pytest.mark.parametrize("backend", DOUBLE)
def test_a_backend_in_fp64_equals_the_whole_call(backend, case, first, rows):
    drawn = draw(case, torch.float64)
    got, want = both(drawn, first, rows, gradient(case, rows, torch.float64), by(backend))
    assert torch.allclose(got[0], want[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=1e-11)


def marked(backend):
    """Each case of a backend; the interpreter takes seconds for one, and two of them are quick."""
    for number, case in enumerate(CUTS):
        later = backend == "triton" and number not in (1, 6)
        bulk = later and number in (0, 4, 5)  # what the others have, without packing and sinks
        marks = [pytest.mark.slow] * later + [pytest.mark.long] * bulk
        yield pytest.param(backend, *case, torch.float32, marks=marks)


# In fp16 the kernels fetch by TMA, and lines of statistics too where T is a multiple of 4.
FP16 = Case(40, batch=2, kv_heads=1, group=2)


@pytest.mark.parametrize(
    "backend, case, first, rows, dtype",
    [
        *(x for name in NAMES for x in marked(name)),
        ("triton", FP16, 13, 24, torch.float16),
        pytest.param("triton", FP16, 8, 27, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_backend_keeps_the_accuracy_rule(backend, case, first, rows, dtype):
    drawn, do = exactly_selected(draw(case, dtype)), gradient(case, rows, dtype)
    if backend in WITH_GRADIENT:
        got, plain = both(drawn, first, rows, do, by(backend))
    else:
        args, options = cut(drawn, first, rows)
        with torch.no_grad():
            got = by(backend)(*args, **options, q_start=first), {}
        with pytest.raises(registry.Declined, match="no backward"):
            by(backend)(*args, **options, q_start=first)
        _, plain = both(drawn, first, rows, do)
    _, truth = both(drawn.to(torch.float64), first, rows, do)
    assert_as_accurate("o", got[0], plain[0], truth[0])
    largest = max(float(x.abs().max()) for x in truth[1].values())
    for name, mine in got[1].items():
        slack = 4.0 if name.startswith("phi_key_") else 2.0
        of = plain[1][name], truth[1][name]
        assert_as_accurate(f"d_{name}", mine, *of, slack=slack, magnitude=largest)


@pytest.mark.parametrize("backend", [name for name in NAMES if name != "triton"])
def test_log_sum_exps_and_the_selection_are_the_whole_calls(backend):
    case, first, rows = CUTS[0]
    drawn = draw(case, torch.float64)
    args, options = cut(drawn, first, rows)
    with torch.no_grad():
        found = nsa_attention(*args, **options, q_start=first, backend=backend, return_lse=True)
    whole = nsa(*drawn.arguments()[0])
    lse = torch.stack([whole.lse[b][:, first:] for b in ("cmp", "slc", "win")], -1)
    assert torch.allclose(found[1], lse, rtol=0, atol=1e-11)
    assert torch.allclose(found[2], lse.logsumexp(-1), rtol=0, atol=1e-11)


SCORED = [
    (Case(70, config=SMALL, group=1), 41, 20),
    (Case(60, config=SMALL, kv_heads=1, packed=(7, 49, 4)), 20, 38),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case, first, rows", SCORED, ids=str)
def test_the_kernels_score_the_blocks_of_the_whole_call(case, first, rows, dtype):
    drawn = draw(case, dtype)
    whole_args, whole_options = drawn.arguments()
    args, options = cut(drawn, first, rows)
    blocks = []
    with torch.no_grad():
        for inputs in (
            checked(*whole_args, **whole_options),
            checked(*args, **options, q_start=first),
        ):
            blocks.append(triton.select_blocks(inputs, triton.compressed(inputs)[0]))
    assert torch.equal(blocks[1], blocks[0][:, first : first + rows])


def test_the_kernels_take_packed_queries_with_bounds_of_their_own():
    drawn = draw(Case(60, kv_heads=1, packed=KEYS), torch.float32)
    (q, k, v, gates, config), options = drawn.arguments()
    options |= {"cu_seqlens_q": bounds(QUERIES), "q_start": torch.tensor(STARTS)}
    args = q[:, :20], k, v, gates[:, :20], config
    leaves = drawn.leaves.values()
    ours, theirs = (nsa_attention(*args, **options, backend=b) for b in ("triton", "gather"))
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-6)
    ours, theirs = (torch.autograd.grad(o.square().sum(), list(leaves)) for o in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=2e-5)


@pytest.mark.full
def test_compiled_code_takes_an_offset():
    drawn = draw(Case(24, kv_heads=1), torch.float32)
    (q, k, v, gates, config), options = drawn.arguments()
    phi = options["phi"]

    def call(start):
        part = q[:, 13:18], k, v, gates[:, 13:18], config
        return nsa_attention(*part, phi=phi, q_start=start, backend="triton")

    made = torch.compile(call, fullgraph=True, backend="aot_eager")
    for start in (13, 0):
        got, want = made(start), call(start)
        assert torch.equal(got, want)
        of = list(drawn.leaves.values())
        got, want = (torch.autograd.grad(x.square().sum(), of) for x in (got, want))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


KEYS, QUERIES, STARTS = (9, 30, 1, 20), (3, 12, 0, 5), (6, 10, 1, 0)


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("starts", [None, STARTS])
@pytest.mark.parametrize("backend", ["gather", "packed", "masked", "sdpa", "sequential"])
def test_packed_queries_with_bounds_of_their_own_are_each_sequence_alone(backend, starts):
    drawn = draw(Case(60, packed=KEYS, phi="mlp"), torch.float64)
    (q, k, v, gates, config), options = drawn.arguments()
    first = [a - b for a, b in zip(KEYS, QUERIES, strict=True)] if starts is None else starts
    options |= {"cu_seqlens_q": bounds(QUERIES), "backend": backend}
    options["q_start"] = None if starts is None else torch.tensor(starts)
    o = nsa_attention(q[:, :20], k, v, gates[:, :20], config, **options)
    of_k, of_q = bounds(KEYS).tolist(), bounds(QUERIES).tolist()
    for n, start in enumerate(first):
        rows, keys = slice(of_q[n], of_q[n + 1]), slice(of_k[n], of_k[n + 1])
        if rows.start == rows.stop:
            continue
        sides = ({b: x[:, keys] for b, x in side.items()} for side in (k, v))
        want = nsa(q[:, rows], *sides, gates[:, rows], config, phi=options["phi"], q_start=start).o
        assert torch.allclose(o[:, rows], want, rtol=0, atol=1e-12)


def given(case, dtype=torch.float64):
    """A drawn call with phi's keys and values made beforehand, and those."""
    drawn = draw(case, dtype)
    (q, k, v, gates, config), options = drawn.arguments()
    phi, cu = options.pop("phi"), options["cu_seqlens"]
    edges = [0, case.tokens] if cu is None else cu.tolist()
    parts = [slice(*x) for x in pairwise(edges)]
    made = tuple(
        torch.cat([by(x["cmp"][:, part], phi, config) for part in parts], 1)
        for by, x in ((compress_keys, k), (compress_values, v))
    )
    return drawn, (q, k, v, gates, config), options, phi, made


@pytest.mark.parametrize("case", [Case(40, phi="mlp"), Case(60, packed=(7, 30, 1, 22))], ids=str)
@pytest.mark.parametrize("backend", [*DOUBLE, None])
def test_compressed_keys_made_elsewhere_stand_for_phis(backend, case):
    drawn, args, options, phi, made = given(case)
    call, do = by(backend) if backend else definition, gradient(case, case.tokens)
    whole, got = (
        outcome(lambda _, own=own: call(*args, **options, **own), drawn, do)
        for own in ({"phi": phi}, {"compressed": made})
    )
    assert torch.allclose(got[0], whole[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], whole[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("branches, k", [(("slc",), ("slc",)), (("cmp",), ("win",))])
def test_with_them_no_other_keys_of_the_compressed_branch_are_read(branches, k):
    _, (q, keys, values, gates, config), _, phi, made = given(Case(40, phi="linear"))
    options = {"backend": "gather", "branches": branches, "q_start": 30}
    q, gates = q[:, 30:], gates[:, 30:]
    want = nsa_attention(q, keys, values, gates, config, phi=phi, **options)
    keys, values = ({b: side[b] for b in k} for side in (keys, values))
    made = made if "cmp" in branches else (made[0], None)
    got = nsa_attention(q, keys, values, gates, config, compressed=made, **options)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


PACKED = {"cu_seqlens": torch.tensor([0, 12, 20], dtype=torch.int32)}
OWN = PACKED | {"cu_seqlens_q": torch.tensor([0, 4, 8], dtype=torch.int32)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, r"q has T=8 and k has T=20: without q_start .*; q_start=12 makes the queries the new"),
        ({"q_start": -1}, "q_start=-1 of 8 queries is not inside the 20 tokens .*; 0 to 12 would"),
        ({"q_start": 13}, "q_start=13 of 8 queries .*; 0 to 12 would do"),
        ({"q_start": 0, "k": of(1, 7, 2, 16), "v": of(1, 7, 2, 16)}, "each query needs its key"),
        ({"q_start": 0, "v": of(1, 19, 2, 16)}, r"v\['cmp'\] has shape .* wanted \(1, 20, 2, 16\)"),
        ({"q_start": 0, "gates": of(1, 20, 4, 3)}, r"gates must be .* \(1, 8, 4, 3\)"),
        ({"q_start": 0, "k": of(20, 2, 16)}, r"k\['cmp'\] must be \[B, S, HKV, \*\]"),
        ({"q_start": torch.tensor([3])}, "one int is for all sequences of a batch"),
        ({"cu_seqlens_q": OWN["cu_seqlens_q"]}, "needs cu_seqlens, those of the keys"),
        (PACKED | {"q_start": 13}, "q_start=13 of 8 queries"),
        (PACKED | {"cu_seqlens_q": bounds((8,))}, "2 entries and cu_seqlens 3"),
        (PACKED | {"cu_seqlens_q": bounds((4, 5))}, r"cu_seqlens_q=\[0, 4, 9\] must .* T=8"),
        (PACKED | {"cu_seqlens_q": [0, 8]}, "cu_seqlens_q must be an int32 tensor, got a list"),
        (OWN | {"q_start": 3}, r"an int32 tensor \[2\], .*, got 3; None makes them the new"),
        (OWN | {"q_start": torch.ones(2)}, "q_start must be int32 or int64, got torch.float32"),
        (OWN | {"q_start": torch.tensor([0, 5])}, "sequence 1 has 8 keys .* at 5; 0 to 4 would"),
        (OWN | {"cu_seqlens_q": bounds((0, 8)), "cu_seqlens": bounds((13, 7))}, "sequence 1 has 7"),
        ({"q_start": 12, "compressed": of(1, 9, 2, 16)}, "compressed must be a pair"),
        ({"q_start": 12, "compressed": (of(1, 9, 2, 16), None)}, "compressed values is a NoneType"),
        ({"q_start": 12, "compressed": (of(1, 8, 2, 16),) * 2}, "has 8 keys, and 20 tokens have 9"),
        ({"q_start": 12, "compressed": (of(1, 9, 1, 16),) * 2}, r"keys must be \(1, 9, 2, 16\) in"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    call = {"q": of(1, 8, 4, 16), "k": of(1, 20, 2, 16), "v": of(1, 20, 2, 16)}
    call |= {"gates": of(1, 8, 4, 3), "config": TINY, "backend": "gather"} | changes
    with pytest.raises(ValueError, match=message):
        nsa_attention(**call)


def test_an_offset_that_is_no_int_is_refused():
    with pytest.raises(TypeError, match="is not an int"):
        nsa_attention(of(1, 8, 4, 16), *(of(1, 20, 2, 16),) * 2, of(1, 8, 4, 3), TINY, q_start=1.5)


def test_flash_says_that_it_takes_no_offset():
    args = of(1, 8, 4, 16), *(of(1, 20, 2, 16),) * 2, of(1, 8, 4, 3), TINY
    text = explain(*args, q_start=12)
    assert "flash declined" in text and "no q_start" in text
    assert "no q_start" not in explain(*cut(draw(Case(20)), 0, 20)[0])


def test_strict_mode_checks_a_selection_against_all_keys():
    args = of(1, 8, 4, 16), *(of(1, 20, 2, 16),) * 2, of(1, 8, 4, 3), TINY
    blocks = torch.tensor([0, 2], dtype=torch.int32).expand(1, 8, 2, 2)
    options = {"q_start": 12, "backend": "gather", "strict": True}
    assert nsa_attention(*args, **options, blocks=blocks).isfinite().all()
    with pytest.raises(ValueError, match=r"from 1 to 3; legal are 0\.\.2"):
        nsa_attention(*args, **options, blocks=blocks + 1)
