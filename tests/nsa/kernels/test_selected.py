"""The selected kernels against attention over the mask written out."""

import pytest
import torch
from accuracy import assert_same
from backend_calls import DEVICE
from selected_cases import BRANCH, Case, Given, assert_right, planned_for, with_sinks
from torch import Tensor
from torch.nn import functional as F

from nsa.kernels import selected_fwd
from nsa.kernels.common import power_of_two
from nsa.kernels.inverse import inverse
from nsa.kernels.selected_dkdv import selected_dkdv
from nsa.kernels.selected_dq import selected_dq
from nsa.kernels.selected_fwd import selected_forward
from nsa.kernels.selected_plan import SIZES, Plan, plan
from nsa.kernels.tiles import Tile

pytestmark = [pytest.mark.usefixtures("on_device")]
pytestmark += [pytest.mark.gpu] if DEVICE == "cuda" else []

BASE_BRANCH = 0


def ours(case: Case, given: Given, task: int | None = None, **options) -> dict[str, Tensor]:
    """Everything that the kernels compute for a case."""
    sequences, scale = case.sequences(), case.dim**-0.5
    q, k, v, do, blocks = (given[n] for n in ("q", "k", "v", "do", "blocks"))
    gates, planned = given.get("gates"), plan(blocks, sequences, case.group)
    mixed = {"gates": gates, "branch": BRANCH} | options
    sink2, _ = with_sinks(given, q.new_empty(0))
    o, lse2 = selected_forward(q, k, v, planned, sequences, scale, sink2=sink2, **mixed)
    _, rows = with_sinks(given, lse2)
    backward, options = (q, k, v, do, rows.lse2), options | {"o": o, "kept": rows.kept}
    dq, delta = selected_dq(*backward, gates, BRANCH, planned, sequences, scale, **options)
    lookup = inverse(blocks, sequences, task)
    dk, dv = selected_dkdv(*backward, delta, gates, BRANCH, lookup, sequences, scale)
    return {"o": o, "lse2": lse2, "dq": dq, "delta": delta, "dk": dk, "dv": dv}


def check(case: Case, given: Given | None = None, **options) -> Given:
    given = given or case.draw()
    got = ours(case, given, **options)
    assert_right(case, given, dict(got))
    return got


CASES = [
    Case((1,), group=1),
    Case((37,), group=1, kv_heads=2, slots=1),
    Case((50,), group=3, kv_heads=2, dim=24, value_dim=40, slots=4),
    Case((21, 21), group=16, dim=32, dtype="fp16"),
    Case((70,), group=6, slots=5, dtype="fp16", gated=False),
    Case((9,), group=70, kv_heads=2),
    Case((45,), group=2, select_block=20),
    Case((150,), group=16, select_block=100, slots=1),
    Case((5, 0, 1, 30), group=4, kv_heads=2),
    Case((0, 33, 16, 0), group=16, select_block=20, gated=False),
    Case((33,), group=3, kv_heads=2, sink=True),
    Case((5, 0, 1, 70), group=16, select_block=20, dtype="fp16", sink=True),
    Case((70,), group=6, slots=1, gated=False, sink=True),
]
if DEVICE == "cuda":  # what only tensor cores and TMA show
    main = {"group": 16, "dim": 128, "value_dim": 128, "select_block": 64, "slots": 8}
    CASES += [
        Case((800,), kv_heads=2, dtype="bf16", **main),
        Case((300, 41, 260), dtype="bf16", **main),
        Case((700, 700), dtype="bf16", **main | {"group": 4, "dim": 192, "gated": False}),
        Case((600,), kv_heads=2, dtype="fp16", **main | {"group": 3, "dim": 64, "value_dim": 64}),
        Case((3000,), kv_heads=2, dtype="bf16", **main),
    ]


HALF = [
    pytest.param(x, id=str(x), marks=[pytest.mark.long] * (DEVICE == "cpu" and i % 2))
    for i, x in enumerate(CASES)
]


@pytest.mark.full
@pytest.mark.parametrize("case", HALF)
def test_short_sequences_are_left_to_large_tiles_as_accurate_as_torch(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients_are_as_accurate_as_torch(case, monkeypatch):
    monkeypatch.setattr(Plan, "always_large", lambda *_: False)  # tiles of both sizes
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", HALF)
def test_keys_as_rows_are_as_accurate_as_torch(case):
    keys = min(64, power_of_two(case.select_block))
    turned = {size: Tile(16, keys, 4, 2, turned=True) for size in SIZES}
    check(case, tile=turned, force="small")


@pytest.mark.full
@pytest.mark.parametrize("force", ["small", "large"])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_each_size_of_tile_alone_is_right(group, force):
    check(Case((19, 30), group=group, dim=16, value_dim=32), force=force)


@pytest.mark.parametrize(
    "tile", [Tile(16, 16, 4, 1), Tile(32, 32, 4, 2), Tile(16, 16, 4, 2, turned=True)]
)
def test_the_tile_changes_nothing_but_rounding(tile):
    case = Case((40,), group=4, select_block=32)
    given = case.draw()
    got = ours(case, given, tile={"small": tile, "large": tile})
    sequences, tensors = case.sequences(), [given[n] for n in ("q", "k", "v", "do")]
    sums = got["lse2"], got["delta"], given["gates"], BRANCH, inverse(given["blocks"], sequences)
    dk, dv = selected_dkdv(*tensors, *sums, sequences, 0.25, tile=tile)
    assert_right(case, given, got | {"dk": dk, "dv": dv})


@pytest.mark.full
def test_no_output_depends_on_what_later_tokens_select_or_hold():
    case = Case((52,), group=16)
    given = case.draw()
    given["blocks"][:31] %= 2  # neighbours agree, then they do not: tiles of both sizes
    before = ours(case, given)
    for cut in (17, 35):
        changed = {n: x.clone() for n, x in given.items()}
        for name in ("q", "k", "v", "gates"):
            changed[name][cut:] = torch.rand_like(changed[name][cut:])
        changed["blocks"][cut:] = torch.randint(0, 8, changed["blocks"][cut:].shape).int()
        after = ours(case, changed)
        for name in ("o", "lse2", "dq", "delta"):
            assert torch.equal(after[name][:cut], before[name][:cut]), (name, cut)


def test_the_size_of_the_first_tile_does_not_hinge_on_later_tokens():
    case = Case((32,), group=4, select_block=4)
    given = case.draw()
    given["blocks"][...] = torch.tensor([1, 0, 0])
    before = ours(case, given, cost=2.0)
    given["blocks"][8:] = -1  # neighbours no longer agree: small tiles, if these were asked
    after = ours(case, given, cost=2.0)
    for name in ("o", "lse2", "dq", "delta"):
        assert torch.equal(after[name][:8], before[name][:8]), name


def test_the_first_tile_of_each_sequence_is_large_whatever_those_before_it_select(monkeypatch):
    monkeypatch.setattr(Plan, "always_large", lambda *_: False)  # tiles of both sizes
    every = selected_fwd.launches
    monkeypatch.setattr(
        selected_fwd, "launches", lambda *a: [one for one in every(*a) if not one.walk.large]
    )
    case = Case((48, 32), group=4, select_block=4)
    given = case.draw()
    given["blocks"][...] = -1
    position = torch.cat([torch.arange(n) for n in case.lengths])
    given["blocks"][..., 0] = (position // 4)[:, None]  # four neighbours alike, the next ones not
    sequences, out = case.sequences(), torch.full((80, 4, 16), torch.nan)
    planned = plan(given["blocks"], sequences, case.group)
    given = given["q"], given["k"], given["v"], planned, sequences, 0.25
    selected_forward(*given, cost=2.0, out=out)
    large = planned.large.tokens_per_tile
    small = out.isfinite().all(-1).all(-1)  # what small tiles have written
    assert small.tolist() == [t >= large for n in case.lengths for t in range(n)]


@pytest.mark.full
def test_what_a_token_gets_does_not_hinge_on_the_price_of_a_large_tile():
    case = Case((64,), group=16)
    given = case.draw()
    for cost in (0.01, 1.0, 100.0):
        check(case, given, cost=cost)


def test_the_output_is_mixed_with_a_base_in_place():
    given, planned, sequences = planned_for(Case((40,), group=3))
    arguments = given["q"], given["k"], given["v"], planned, sequences, 0.25
    plain, _ = selected_forward(*arguments)
    gates, base = given["gates"], torch.randn_like(plain)
    gated = plain * gates[..., BRANCH, None]
    weighted = gated + base * gates[..., BASE_BRANCH, None]
    mixed = {"gates": gates, "branch": BRANCH, "base": base}
    got, _ = selected_forward(*arguments, **mixed)
    torch.testing.assert_close(got, gated + base)
    got, _ = selected_forward(*arguments, **mixed, base_branch=BASE_BRANCH, out=base)
    assert got is base
    torch.testing.assert_close(base, weighted)


def test_dq_is_added_to_and_the_gates_gradient_written_where_asked():
    given, planned, sequences = planned_for(Case((40,), group=3))
    q, k, v, do, gates = (given[n] for n in ("q", "k", "v", "do", "gates"))
    o, lse2 = selected_forward(q, k, v, planned, sequences, 0.25, gates=gates, branch=BRANCH)
    arguments = q, k, v, do, lse2, gates, BRANCH, planned, sequences, 0.25
    alone, delta = selected_dq(*arguments, o=o)
    dgates = torch.full(gates.shape, 7.0)
    before = torch.randn_like(q)
    total, _ = selected_dq(*arguments, o=o, dgates=dgates, dq=before.clone())
    torch.testing.assert_close(total, before + alone)
    assert torch.equal(dgates[..., BRANCH], delta)
    assert (dgates[..., [0, 2]] == 7.0).all()


@pytest.mark.full
@pytest.mark.parametrize("scanned", [0, 1 << 20])
def test_a_block_of_many_tokens_is_summed_from_parts_alike_every_time(scanned, monkeypatch):
    monkeypatch.setattr("nsa.kernels.inverse.SCANNED", scanned)
    case = Case((61,), group=4, kv_heads=2)
    given = case.draw()
    given["blocks"][..., 0] = 0
    got, again = check(case, given, task=7), ours(case, given, task=7)
    assert torch.equal(got["dk"], again["dk"]) and torch.equal(got["dv"], again["dv"])


@pytest.mark.full
@pytest.mark.parametrize("task", [7, None])
def test_a_block_longer_than_a_tile_of_keys_is_taken_part_by_part(task):
    case = Case((90,), group=2, select_block=40, slots=2)
    given = case.draw()
    given["blocks"][..., 0] = torch.arange(90)[:, None] // 40  # all of a block's tokens choose it
    check(case, given, task=task)


def test_dq_vanishes_where_one_key_has_all_the_weight():
    case = Case((64,), group=4, dtype="fp16")
    given = case.draw()
    given["q"] *= 30
    given["v"] *= 8
    check(case, given)


def test_blocks_that_nobody_selects_get_a_gradient_of_zero():
    case = Case((60,), group=2)
    given = case.draw()
    given["blocks"][...] = torch.tensor([1, 4, 1])
    got = ours(case, given)
    unselected = torch.tensor([i // 8 not in (1, 4) for i in range(60)])
    for name in ("dk", "dv"):
        assert not got[name][unselected].any()
        assert got[name][~unselected].any()
    for name in ("o", "dq", "delta"):
        assert not got[name][:8].any()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, for NaN
def test_not_a_number_stays_within_its_sequence():
    case = Case((13, 18, 9), group=3)
    given = case.draw()
    clean = ours(case, given)
    for name in ("q", "k", "v", "do", "gates"):
        given[name][13:31] = float("nan")
    dirty = ours(case, given)
    others = torch.cat([torch.arange(13), torch.arange(31, 40)])
    for name, value in dirty.items():
        assert torch.equal(value[others], clean[name][others]), name


def test_what_lies_behind_the_last_column_is_not_read():
    case = Case((20,), group=2, dim=24, value_dim=40)
    given = case.draw()
    plain = ours(case, given)
    for name in ("q", "k", "v", "do"):
        x = given[name]
        given[name] = F.pad(x, (0, 64 - x.shape[2]), value=float("nan"))[..., : x.shape[2]]
    for name, value in ours(case, given).items():
        assert_same(value, plain[name], name)


@pytest.mark.full
def test_strided_and_expanded_inputs_are_read_where_they_lie():
    case = Case((40,), group=2, kv_heads=2, slots=2)
    given = case.draw()
    plain = ours(case, given)
    strided = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in given.items()}
    strided["blocks"] = torch.stack([given["blocks"]] * 2, dim=-1)[..., 0]
    strided["gates"] = given["gates"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for name, value in ours(case, strided).items():
        assert torch.equal(value, plain[name]), name
    one = given | {n: given[n][:, :1].expand_as(given[n]) for n in ("k", "v")}
    wanted = ours(case, {n: x.contiguous() for n, x in one.items()})
    for name, value in ours(case, one).items():
        assert torch.equal(value, wanted[name]), name


def test_a_size_of_tile_that_there_is_not_is_refused():
    case = Case((8,))
    with pytest.raises(ValueError, match="force='huge' is neither None nor one of small, large"):
        ours(case, case.draw(), force="huge")
