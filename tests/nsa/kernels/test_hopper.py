"""The kernels of specialized warps: on a GPU, and adversarially emulated where there is none."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from backend_calls import DEVICE
from hopper_cases import FEW, FINE, OF_BLOCKS, by_warps, scored, selected
from processes import told_by
from selected_cases import BRANCH, assert_right
from selected_cases import Case as Chosen
from selection_cases import assert_selects_as_well, scores
from span_cases import COMPRESSED, WINDOW, Case, Problem, check

from nsa.blocks import Span, compressed_span, window_span
from nsa.config import NSAConfig
from nsa.kernels.hopper import first_use, launches
from nsa.kernels.selected_dq import selected_dq
from nsa.kernels.selected_fwd import selected_forward
from nsa.kernels.selected_plan import kept_plan, layout_of, plan
from nsa.kernels.sequences import Axis
from nsa.kernels.topk import select_blocks

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")

# Tokens past one program's 128 rows, a last tile that is not full, more keys than one tile has.
CASES = [
    (Case((300,), COMPRESSED, 2, 1, 64, 64), True),
    (Case((132, 132), COMPRESSED, 2, 1, 128, 128), True),
    (Case((1100,), COMPRESSED, 1, 1, 64, 64), False),
    (Case((204,), WINDOW, 4, 2, 64, 64), True),
    (Case((260,), Span(lookback=130), 2, 1, 128, 128), False),
    (Case((64,), COMPRESSED, 2, 2, 64, 64), True),
    (Case((8,), COMPRESSED, 2, 2, 64, 64), True),
]


# Tiles of 16, 5, 4 and 1 tokens; a last one that is not full; tokens that selected nothing.
CHOSEN = [
    Chosen((200,), group=4, kv_heads=2, slots=3, **OF_BLOCKS),
    Chosen((140, 140), group=12, slots=4, **OF_BLOCKS),
    Chosen((200,), group=16, slots=2, **OF_BLOCKS | {"dim": 128, "value_dim": 128}),
    Chosen((70,), group=64, slots=1, gated=False, **OF_BLOCKS),
    Chosen((9,), group=3, kv_heads=2, slots=2, **OF_BLOCKS),
]
# Steps of 128 keys: none, one, two by one warpgroup each, an odd number; a last tile that is not
# full; fewer slots than a power of two; a group of an odd number of heads.
SCORED = [
    ((2, 252), FINE, 4, 2),
    ((1, 700), FINE, 2, 1),
    ((1, 392), NSAConfig(1, 1, 4, 11, select_initial=2, select_local=3, window=6), 3, 1),
    ((1, 532), NSAConfig(4, 1, 4, 16, window=6), 8, 1),
    ((2, 12), FINE, 2, 1),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_outputs_and_gradients_are_as_accurate_as_plain_torch(run, number):
    run(seed=number)
    case, gated = CASES[number]
    check(by_warps(case, number), gated)


@pytest.mark.parametrize("number", [0, 1, 3, 4, 6])
def test_sinks_take_their_share_as_accurately_as_by_plain_torch(run, number):
    run(seed=number)
    case, gated = CASES[number]
    check(by_warps(replace(case, sink=True), number), gated)


def at_offset(axis: Axis, start: int) -> Axis:
    """The rows from `start` of each sequence on, which keep their positions."""
    starts = torch.full((axis.count,), start, dtype=torch.int32, device=DEVICE)
    return Axis(axis.count, axis.length - start, starts=starts)


def newest(x: torch.Tensor, axis: Axis, start: int) -> torch.Tensor:
    """The rows of x from `start` of each sequence on."""
    return x.unflatten(0, (axis.count, axis.length))[:, start:].flatten(0, 1).contiguous()


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        largest = value[value.isfinite()].abs().max().float()
        assert torch.equal(got[name].isfinite(), value.isfinite()), name
        error = torch.where(value == got[name], 0.0, (got[name] - value).float()).abs().max()
        assert error <= 0.02 * largest, (name, float(error), float(largest))


@pytest.mark.parametrize(("number", "start"), [(0, 140), (1, 52), (2, 1096), (3, 100), (4, 132)])
def test_queries_at_an_offset_come_out_as_by_tritons_kernels(run, number, start):
    run(seed=number)
    case, gated = CASES[number]
    problem = Problem(by_warps(case, number))
    axis, problem.tokens = problem.tokens, at_offset(problem.tokens, start)
    for name in ("q", "do", "base", "gates"):
        setattr(problem, name, newest(getattr(problem, name), axis, start))
    got = problem.kernels(gated)
    problem.chosen["specialized"] = False
    assert_close(got, problem.kernels(gated))


@pytest.mark.full
@pytest.mark.parametrize(("number", "start"), [(0, 130), (1, 61), (2, 70), (4, 5)])
def test_selected_blocks_of_queries_at_an_offset_are_attended_to_as_by_triton(run, number, start):
    run(seed=number)
    with torch.device(DEVICE):
        case = CHOSEN[number]
        sequences, given = case.sequences(), case.draw()
        axis = sequences.tokens
        of_queries = [name for name in given if name not in ("k", "v")]
        given |= {name: newest(given[name], axis, start) for name in of_queries}
        late = replace(sequences, offset=at_offset(axis, start))
        case = partial(selected, SimpleNamespace(**vars(case), sequences=lambda: late), given)
        assert_close(case(specialized=True), case(specialized=False))


@pytest.mark.full
@pytest.mark.parametrize(("number", "start"), [(0, 100), (1, 300), (2, 12), (3, 404)])
def test_queries_at_an_offset_select_as_by_tritons_kernels(run, number, start):
    run(seed=number)
    q, k_cmp, lse2, sequences, scale = scored(*SCORED[number], number)
    axis = sequences.tokens
    given = newest(q, axis, start), k_cmp, newest(lse2.T, axis, start).T.contiguous()
    given += replace(sequences, offset=at_offset(axis, start)), scale
    by_triton = select_blocks(*given, specialized=False)
    differ = select_blocks(*given, specialized=True) != by_triton
    assert by_triton.max() > start // sequences.config.select_block  # their positions count
    assert differ.float().mean() < 0.01  # importances that are equal but for their last bits


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "sink"), [*((n, False) for n in range(len(CHOSEN))), (0, True), (3, True)]
)
def test_selected_blocks_are_attended_to_as_accurately_as_by_plain_torch(run, number, sink):
    run(seed=number)
    with torch.device(DEVICE):
        case = replace(CHOSEN[number], sink=sink)
        given = case.draw()
        assert_right(case, given, selected(case, given))


@pytest.mark.parametrize("number", range(len(SCORED)))
def test_what_is_selected_is_as_important_as_exactly(run, number):
    run(seed=number)
    given = scored(*SCORED[number], number)
    q, k_cmp, _, sequences, scale = given
    config, tokens = sequences.config, sequences.tokens.length
    got = select_blocks(*given, specialized=True)
    keys = k_cmp.split(sequences.compressed.length)
    for rows, those, blocks in zip(q.split(tokens), keys, got.split(tokens), strict=True):
        assert_selects_as_well(blocks, scores(rows, those, config, scale), config, q.dtype)


@pytest.mark.full
@pytest.mark.parametrize("base_branch", [None, 0])
def test_selected_blocks_are_added_to_a_base_in_its_place(run, base_branch):
    run()
    with torch.device(DEVICE):
        case = FEW
        given = case.draw()
        alone = selected(case, given)["o"]
        base = torch.randn_like(alone)
        weight = 1.0 if base_branch is None else given["gates"][..., base_branch, None].float()
        out = base.clone()
        got = selected(case, given, base=out, base_branch=base_branch, out=out)["o"]
        assert got is out
        wanted = alone.float() + weight * base.float()
        torch.testing.assert_close(got.float(), wanted, rtol=0, atol=4e-3)


def test_the_other_branches_share_of_the_sum_is_taken_off_and_dq_added_to(run):
    run()
    with torch.device(DEVICE):
        given, sequences = FEW.draw(), FEW.sequences()
        given["gates"][5, :, BRANCH] = 0.0
        q, k, v, do, gates = (given[n] for n in ("q", "k", "v", "do", "gates"))
        planned, scale = plan(given["blocks"], sequences, FEW.group), FEW.dim**-0.5
        alone, lse2 = selected_forward(q, k, v, planned, sequences, scale, gates=gates)
        arguments = q, k, v, do, lse2, gates, BRANCH, planned, sequences, scale
        dq, delta = selected_dq(*arguments, o=alone, specialized=True)
        # Two more branches; a token that weighs this one by nothing has its delta all the same.
        others = [torch.randn_like(alone) for _ in range(2)]
        o = alone + sum(gates[..., n, None] * x for n, x in zip((0, 2), others, strict=True))
        deltas = [((do.float() * x.float()).sum(2).T.contiguous(), n) for n, x in
                  zip((0, 2), others, strict=True)]  # fmt: skip
        dgates, before = torch.full_like(gates, 7.0), torch.randn_like(q)
        given = {"o": o, "others": deltas, "dgates": dgates, "specialized": True}
        total, same = selected_dq(*arguments, **given, dq=before.clone())
        torch.testing.assert_close(same, delta, rtol=0, atol=1e-4)
        torch.testing.assert_close(total, before + dq, rtol=0, atol=0.02)
        torch.testing.assert_close(
            dgates[..., BRANCH], delta.to(dgates.dtype), rtol=1e-3, atol=1e-3
        )
        assert (dgates[..., [0, 2]] == 7.0).all()


@pytest.mark.parametrize("span", [COMPRESSED, WINDOW], ids=["compressed", "window"])
def test_delta_that_is_given_is_used_and_dq_is_added_to(run, span):
    run()
    problem = Problem(by_warps(Case((140,), span, 2, 1, 64, 64), 0))
    _, lse2 = problem.forward()
    made, delta = problem.dq(lse2)
    given, same = problem.dq(lse2, delta=delta)
    assert same is delta
    scale = made.abs().max()
    torch.testing.assert_close(given / scale, made / scale, rtol=0, atol=0.03)
    before = torch.full_like(made, 3.0)
    added, _ = problem.dq(lse2, delta=delta, dq=before.clone())
    torch.testing.assert_close(added / scale, (before + given) / scale, rtol=0, atol=0.03)


def test_parts_of_a_few_keys_add_up(run, monkeypatch):
    run()
    monkeypatch.setattr("nsa.kernels.span_bwd.processors", lambda device: 24)
    monkeypatch.setattr("nsa.kernels.span_bwd.LEAST_STEPS", 1)
    check(by_warps(Case((300,), COMPRESSED, 2, 1, 64, 64), 0))
    check(by_warps(Case((260,), WINDOW, 4, 1, 64, 64), 0))


def test_the_order_of_warps_changes_no_bit(run):
    found = []
    for seed in range(6):
        run(seed=1000 * seed)
        torch.manual_seed(5)
        found.append(Problem(by_warps(Case((300,), COMPRESSED, 1, 1, 64, 64), 0)).kernels())
    for one in found[1:]:
        assert all(torch.equal(one[name], found[0][name]) for name in one)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="shapes that only a GPU takes in a second")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [8192, 12324])
@pytest.mark.parametrize("of", [compressed_span, window_span], ids=["compressed", "window"])
def test_long_sequences_come_out_as_by_tritons_kernels_and_the_same_every_time(of, tokens, dim):
    def case(specialized: bool) -> Problem:
        torch.manual_seed(0)
        given = Case((tokens,), of(NSAConfig()), 32, 2, dim, dim, torch.bfloat16, None, specialized)
        problem = Problem(given)
        problem.keys = Axis(1, given.keys_of(tokens))
        problem.k, problem.v = (
            torch.randn(problem.keys.length, 2, dim, device=DEVICE, dtype=torch.bfloat16)
            for _ in range(2)
        )
        return problem

    want, mine = case(False).kernels(), case(True)
    first = mine.kernels()
    for name, value in first.items():
        scale = want[name].float().abs().max()
        torch.testing.assert_close(value / scale, want[name] / scale, rtol=0, atol=0.01)
    for _ in range(10):
        assert all(torch.equal(first[name], value) for name, value in mine.kernels().items())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="shapes that only a GPU takes in a second")
@pytest.mark.parametrize("group", [4, 12, 16])
@pytest.mark.parametrize("tokens", [8192, 12324])
def test_long_selections_come_out_as_by_tritons_kernel_and_the_same_every_time(tokens, group):
    wide = OF_BLOCKS | {"dim": 128, "value_dim": 128, "slots": 16}
    case = Chosen((tokens,), group=group, kv_heads=4, **wide)
    with torch.device(DEVICE):
        given = case.draw()
        want, first = selected(case, given, specialized=False), selected(case, given)
        for name, value in first.items():
            unseen = torch.isneginf(want[name])
            torch.testing.assert_close(
                value.masked_fill(unseen, 0), want[name].masked_fill(unseen, 0), rtol=0, atol=0.01
            )
        for _ in range(10):
            again = selected(case, given)
            assert all(torch.equal(first[name], again[name]) for name in first)


def refused(kernel="dq", tokens=128, **changes):
    shape = {"dim": 64, "value_dim": 64, "dtype": torch.bfloat16} | changes
    q = torch.zeros(tokens, 2, shape["dim"], dtype=shape["dtype"])
    v = torch.zeros(tokens, 2, shape["value_dim"], dtype=shape["dtype"])
    axis = Axis(1, tokens, torch.tensor([0, tokens]) if changes.get("packed") else None)
    return launches.why_not(kernel, axis, axis, (q, q, v, v))


@emulated
def test_what_they_do_not_take_is_said(monkeypatch):
    assert "compiled for a GPU, and this is cpu" in refused()
    monkeypatch.setattr(launches, "compiles_for", lambda x: True)
    assert refused() is None
    assert "D and DV are 192 and 128" in refused(dim=192, value_dim=128)
    assert "D and DV are 96 and 96" in refused(dim=96, value_dim=96)
    assert "16-bit" in refused(dtype=torch.float32)
    assert "dense sequences" in refused(packed=True)
    assert "T is 130" in refused("dkdv", 130) and refused("dq", 130) is None
    monkeypatch.setattr(launches.triton, "__version__", "3.9.1")
    assert "Triton 3.9.1 was not tested, but 3.6, 3.7" in refused()
    monkeypatch.setattr(launches, "architecture", lambda device: 80)
    assert "this is sm_80" in refused()


@emulated
def test_auto_takes_what_was_measured_faster_and_nothing_else(monkeypatch):
    monkeypatch.setattr(launches, "compiles_for", lambda x: True)

    def chosen(kernel, span, tokens, dim=128, asked=None):
        x = torch.zeros(tokens, 1, dim, dtype=torch.bfloat16)
        return launches.tile_for(kernel, asked, span, Axis(1, tokens), Axis(1, tokens), (x,) * 4)

    def of_blocks(tokens, group=4, select_block=64, asked=None, kernel="selected"):
        case = Chosen((tokens,), group=group, **OF_BLOCKS | {"select_block": select_block})
        blocks = torch.zeros(tokens, 1, 1, dtype=torch.int32)
        size = layout_of(case.sequences().tokens, 1, 1, group).elements()
        workspace = torch.zeros(size, dtype=torch.int32)
        planned = kept_plan(workspace, blocks, case.sequences(), group)
        q, k = (torch.zeros(tokens, n, 128, dtype=torch.bfloat16) for n in (group, 1))
        return launches.selected_tile(kernel, asked, planned, case.sequences(), (q, k, k))

    assert chosen("forward", COMPRESSED, 32768).keys == 128
    assert chosen("forward", COMPRESSED, 8192).keys == 64
    assert chosen("forward", COMPRESSED, 8188) is None
    assert chosen("forward", WINDOW, 2048) and chosen("forward", WINDOW, 2048, 64) is None
    assert chosen("dq", WINDOW, 65536) is None and chosen("dq", WINDOW, 65536, 64)
    assert chosen("dq", COMPRESSED, 8192, asked=False) is None
    assert chosen("dq", WINDOW, 128, asked=True) == launches.ASKED["dq"]
    assert chosen("dkdv", COMPRESSED, 8190) is None  # lines that TMA cannot fetch
    assert chosen("scores", None, 16384) and chosen("scores", None, 16382) is None
    assert of_blocks(8192) and of_blocks(8191) is None and of_blocks(8192, select_block=32) is None
    assert of_blocks(8192, group=2) is None  # 32 rows
    monkeypatch.setattr(launches, "name_of", lambda device: "NVIDIA H200")
    assert of_blocks(65536) and of_blocks(65472, 16) and of_blocks(65536, 16) is None
    assert of_blocks(4096, kernel="selected_dq") and of_blocks(32704, 16, kernel="selected_dq")
    assert of_blocks(32768, 16, kernel="selected_dq") is None
    monkeypatch.setattr(launches, "name_of", lambda device: "NVIDIA H100 80GB HBM3")
    assert of_blocks(65536, 16)
    monkeypatch.setattr(launches, "processors", lambda device: 132)
    assert chosen("forward", COMPRESSED, 32768) is None  # one head: a tile to two processors
    assert of_blocks(8192) is None


@emulated
def test_a_new_gpu_is_held_to_tritons_kernels_once(run):
    run()
    wanted = torch.device("cpu"), torch.float16, 64, 140
    first_use.compare.__wrapped__(*wanted)
    run(change=lambda source: source.replace("acc = acc * scale\n", "acc = acc * scale * 1.1\n"))
    with pytest.raises(RuntimeError, match=r"dq of Span\(.*lookback=512\).* differs by"):
        first_use.compare.__wrapped__(*wanted)


@emulated
def test_asked_for_by_name_they_run_or_say_why_not():
    q = torch.zeros(128, 2, 64, dtype=torch.bfloat16)
    given = "dq", True, COMPRESSED, Axis(1, 128), Axis(1, 31), (q, q, q, q)
    with pytest.raises(ValueError, match="dq by specialized warps: they are compiled for a GPU"):
        launches.tile_for(*given)
    assert launches.tile_for("dq", None, *given[2:]) is None
    case = Chosen((9,), group=2, **OF_BLOCKS)
    with pytest.raises(ValueError, match="33 to 64 rows a tile, and these are 64, 32 of 2 heads"):
        selected(case, case.draw())
    for config in (NSAConfig(4, 2, 4, 4, window=6), NSAConfig(2, 1, 4, 33, window=6)):
        with pytest.raises(ValueError, match="32 of 8192 blocks of four strides at most, and NSAC"):
            select_blocks(*scored((1, 40), config, 2, 1), specialized=True)


@emulated
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "width", "kind"),
    [
        ("main", 128, "warps"),
        ("narrow", 64, "warps-with-sinks"),
        pytest.param("main", 128, "warps-with-sinks", marks=pytest.mark.long),
        pytest.param("main", 128, "warps-offset", marks=pytest.mark.long),
        pytest.param("narrow", 64, "warps", marks=pytest.mark.long),
    ],
)
def test_they_compile_for_hopper_and_no_product_waits_for_the_one_before(shape, width, kind):
    found = told_by("compiled.py", 90, shape, kind)["compiled"]
    mine = [x for x in found if ".hopper." in x["kernel"]]
    taken = sorted(kernel for kernel, of_width, _ in launches.FASTER if of_width == width)
    assert sorted(x["kernel"].split(".")[-1].removesuffix("_kernel") for x in mine) == taken
    assert not [x for x in mine if x["serialized"]], mine
    assert not [x for x in mine if x["shared"] > 227 * 1024], mine
    assert not [x for x in mine if x["spilled"] > 128], mine
