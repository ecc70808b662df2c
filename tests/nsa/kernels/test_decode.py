"""The decode kernels against the definition: what a step writes and what it attends to."""

from dataclasses import replace
from random import Random

import pytest
import torch
from accuracy import assert_as_accurate
from backend_calls import DEVICE
from cases import EVEN, ODD, SMALL, TINY
from decode_inputs import Step, after, draw, on_cache, whole

from nsa.config import NSAConfig
from nsa.kernels.decode import Call, declined, decode, tuning
from nsa.kernels.decode_common import Tuning
from nsa.reference.nsa import nsa

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

CUT = Tuning(
    score_rows=16, score_keys=16, score_splits=3, score_warps=4, score_stages=1, choose_blocks=8,
    choose_warps=4, attend_keys=16, selected_splits=3, window_splits=2, attend_warps=4,
    attend_stages=1, dependent=False,
)  # fmt: skip
WHOLE = CUT._replace(score_splits=1, selected_splits=1, window_splits=1)


def check(step: Step, tuned: Tuning | None = CUT) -> None:
    cache = draw(step, DEVICE)
    args, kwargs = cache.arguments()
    o = decode(*args, **kwargs, tuned=tuned)
    for name, want in after(cache).items():
        if want is not None and want.is_floating_point():
            written(name, cache.tensors[name], want, step.dtype)
    assert o.dtype == step.dtype
    if step.dtype == torch.float32:
        torch.testing.assert_close(o.double(), whole(cache), atol=2e-5, rtol=0)
    exact = on_cache(cache, cache.tensors, torch.float64)
    assert_as_accurate("o", o, on_cache(cache, cache.tensors, step.dtype), exact)


def written(name, got, want, dtype):
    """Rows are kept bit by bit, compressed ones to a rounding; where nothing is known, anything."""
    known = ~want.isnan()
    if name.endswith("cmp"):
        error = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(got[known], want[known], rtol=error, atol=error, msg=name)
        assert got[~known].isnan().all(), f"{name}: a row that is not complete was written"
    else:
        assert torch.equal(got[known], want[known]), name


@pytest.mark.parametrize(("page", "tuned"), [(16, CUT), (None, WHOLE)], ids=["pages", "whole"])
def test_sequences_of_other_lengths_side_by_side(page, tuned):
    check(Step((3, 50), TINY, page=page), tuned)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [range(10), (15, 16, 17, 31, 32, 33, 40)], ids=["first", "later"]
)
def test_at_every_edge_of_a_block(lengths):
    check(Step(tuple(lengths), TINY, page=8), WHOLE)


@pytest.mark.parametrize("new", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_several_new_tokens_and_fewer_of_some_sequences(new):
    check(Step((29, 7), TINY, new=new, counts=(new, new - 2), page=8), WHOLE)
    check(Step((29, 0), TINY, new=2, counts=(0, 1), page=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "dtype"),
    [(1, torch.bfloat16), (3, torch.float16), (6, torch.bfloat16), (16, torch.float16)],
)
def test_any_group_and_16_bits(group, dtype):
    check(Step((45,), TINY, new=2, group=group, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 40), (192, 128)])
def test_head_dims_that_are_no_power_of_two(dim, value_dim):
    check(Step((45,), TINY, dim=dim, value_dim=value_dim, page=16))


@pytest.mark.parametrize(
    ("phi", "rotary"),
    [
        ("linear", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("mean", True), ("linear", False), ("mlp", False), ("mlp", True),
        )),
    ],
)  # fmt: skip
def test_phi_of_the_blocks_that_a_step_completes(phi, rotary):
    step = Step((9, 38), TINY, new=4, phi=phi, rotary=rotary, dim=24, value_dim=20)
    check(replace(step, page=8), WHOLE)
    step = replace(step, lengths=(9,), new=1, dim=16, kv_heads=2)
    check(replace(step, dtype=torch.bfloat16), WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "branches", [("cmp",), ("slc",), ("win",), ("cmp", "win"), ("cmp", "slc"), ("slc", "win")]
)
def test_branches_that_are_not_computed_need_no_tensors(branches):
    check(Step((37,), TINY, branches=branches, new=2), CUT)
    check(Step((37,), TINY, branches=branches), WHOLE)


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("slc",)], ids=str)
@pytest.mark.parametrize("tuned", [CUT, WHOLE], ids=["cut", "whole"])
def test_a_selection_is_handed_out_and_another_one_is_taken(tuned, branches):
    step = Step((40, 37), TINY, new=2, page=8, branches=branches)
    slots = 2, 2, step.kv_heads, 4
    chosen = torch.full(slots, -1, dtype=torch.int32, device=DEVICE)
    other = torch.tensor([1, 2, 4, -1], dtype=torch.int32, device=DEVICE).expand(slots)
    found = []
    for how in ({"selection": chosen}, {"given": chosen}, {"given": other}):
        cache = draw(step, DEVICE)
        args, kwargs = cache.arguments()
        found.append(decode(*args, **kwargs, **how, tuned=tuned))
        for b, held in enumerate(step.lengths):
            own, total = slice(b, b + 1), held + 2
            k, v = (
                {n: x[own, :total].double() for n, x in side.items()} for side in (cache.k, cache.v)
            )
            q, gates = cache.q[own].double(), cache.gates[own].double()
            blocks = how["given"][own] if "given" in how else None
            given = {"branches": branches, "q_start": held, "blocks": blocks}
            exact = nsa(q, k, v, gates, TINY, **given)
            torch.testing.assert_close(found[-1][own].double(), exact.o, atol=2e-5, rtol=0)
            if blocks is None:
                assert torch.equal(chosen[own], exact.blocks)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.slow
def test_one_key_for_all_branches_needs_no_window_tensors():
    check(Step((37, 6), TINY, shared=True, page=16))
    check(Step((37,), TINY, shared=True, branches=("win",)))


# A window of one; blocks that are no power of two; a token a stride; blocks longer than a tile.
FINE = NSAConfig(3, 1, 6, 4, window=6)
LONG = NSAConfig(4, 2, 64, 3, window=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "length"), [(EVEN, 45), (ODD, 150), (FINE, 41), (LONG, 250), (SMALL, 300)],
    ids=["even", "odd", "fine", "long", "small"],
)  # fmt: skip
def test_any_sizes(config, length):
    check(Step((length,), config, new=2, page=2 * config.select_block), None)
    check(Step((length,), config), CUT._replace(score_keys=32))


@pytest.mark.slow
def test_sizes_as_the_launcher_tunes_them():
    config = NSAConfig()
    tuned = tuning(Call(2, 1, 4, 32, 32, 1, 2048, config, False, 90, 132))
    assert tuned.score_splits > 1 and tuned.selected_splits > 1
    step = Step((1100,), config, group=4, dim=32, value_dim=32, dtype=torch.float16, page=64)
    check(step, tuned._replace(dependent=False))  # which is a GPU's


def test_pages_that_do_not_exist_are_neither_read_nor_written():
    cache = draw(Step((37, 21), TINY, page=8), DEVICE)
    cache.tensors["table"][0, 2], cache.tensors["table"][1, 2:] = -1, 1000
    kept = {n: x.clone() for n, x in cache.tensors.items() if x is not None}
    args, kwargs = cache.arguments()
    o = decode(*args, **kwargs, tuned=CUT)
    assert o.isfinite().all()
    place = cache.tensors["table"][0, 4].long(), 37 % 8
    changed = cache.tensors["k_slc"].isnan() != kept["k_slc"].isnan()
    assert changed[place].all()
    changed[place] = False
    assert not changed.any()


def test_a_full_cache_keeps_nothing_more():
    cache = draw(Step((16,), TINY, page=8), DEVICE)
    cache.tensors["table"] = cache.tensors["table"][:, :2].contiguous()
    before = cache.tensors["k_slc"].clone()
    args, kwargs = cache.arguments()
    o = decode(*args, **kwargs, tuned=CUT)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(cache.tensors["k_slc"].nan_to_num(), before.nan_to_num())


def test_what_is_not_taken_is_said():
    assert not declined(NSAConfig(), 128, 128, torch.bfloat16, 16)
    sizes = {"dim": 300, "value_dim": 64, "dtype": torch.float64, "new": 17}
    assert len(declined(NSAConfig(16, 1, 256, 16), **sizes)) == 5
    args, kwargs = draw(Step((9,), TINY), DEVICE).arguments()
    with pytest.raises(ValueError, match="float64"):
        decode(*(args[0].double(), *args[1:]), **kwargs)
    kwargs["k_raw"] = kwargs["k_raw"][:, :4].contiguous()
    with pytest.raises(ValueError, match="k_raw keeps 4 tokens of a sequence; 1 new ones need 5"):
        decode(*args, **kwargs)


@pytest.mark.long
def test_every_length_one_after_the_other():
    """A cache that the kernels alone have filled, token by token, equals the definition."""
    step = Step((0,), TINY, page=8, capacity=48, phi="linear", rotary=True)
    grown = draw(replace(step, new=45), DEVICE)
    tensors = grown.tensors
    outputs = []
    for t in range(45):
        args, kwargs = grown.arguments()
        one = [{n: x[:, t : t + 1] for n, x in side.items()} for side in args[1:3]]
        kwargs |= {"lengths": torch.full_like(tensors["lengths"], t)}
        given = args[0][:, t : t + 1], *one, args[3][:, t : t + 1]
        outputs.append(decode(*given, **kwargs, tuned=WHOLE))
    got = torch.cat(outputs, 1).double()
    torch.testing.assert_close(got, whole(grown), atol=2e-5, rtol=0)


@pytest.mark.long
def test_random_steps():
    """Lengths, sizes, layouts and cuts at random, of which no list of cases thinks."""
    random = Random(26)
    for seed in range(200):
        config = random.choice((TINY, TINY, EVEN, ODD, FINE, LONG, SMALL))
        new, batch = random.choice((1, 1, 2, 5, 16)), random.choice((1, 2, 3))
        step = Step(
            tuple(random.randrange(6 * config.select_block) for _ in range(batch)), config, new,
            counts=tuple(random.randrange(new + 1) for _ in range(batch)),
            kv_heads=random.choice((1, 2)), group=random.choice((1, 2, 3, 5, 16)),
            dim=random.choice((16, 24, 40, 64)), value_dim=random.choice((16, 20, 48)),
            phi=random.choice(("mean", "mean", "linear", "mlp")), rotary=random.random() < 0.5,
            page=random.choice((None, 1, 2, 3)) and random.choice((1, 2, 3)) * config.select_block,
            shared=random.random() < 0.3, seed=seed,
        )  # fmt: skip
        tuned = CUT._replace(
            score_keys=random.choice((32, 64)), score_splits=random.choice((1, 2, 5)),
            selected_splits=random.choice((1, 2, 7)), window_splits=random.choice((1, 3)),
            choose_blocks=random.choice((64, 128)), attend_keys=random.choice((16, 32)),
        )  # fmt: skip
        try:
            check(step, random.choice((tuned, None)))
        except Exception as problem:
            raise AssertionError(f"{step}, {tuned}") from problem
