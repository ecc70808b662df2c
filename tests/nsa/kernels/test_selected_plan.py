"""The plan of the selected kernels: sizes of tiles, unions of their tokens' blocks, the inverse."""

from itertools import product

import pytest
import torch
from backend_calls import DEVICE
from kernel_inputs import rows_of
from selected_cases import Case, planned_for
from torch import Tensor

from nsa.blocks import compressed_span, window_span
from nsa.config import NSAConfig
from nsa.kernels.inverse import inverse
from nsa.kernels.selected_plan import Plan, kept_plan, launches, plan, tile_tokens
from nsa.kernels.span_common import default_tile as span_tile
from nsa.kernels.tiles import default_tile
from nsa.kernels.unions import Unions, nested_unions, unions

pytestmark = [pytest.mark.usefixtures("on_device")]
pytestmark += [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.full
@pytest.mark.parametrize("lengths", [(37,), (7, 7), (5, 0, 14, 18)])
@pytest.mark.parametrize(("tokens", "pieces"), [(1, 1), (4, 1), (1, 4), (3, 2)])
def test_a_union_holds_each_block_once_in_the_order_of_its_tokens(
    lengths, tokens, pieces, monkeypatch
):
    monkeypatch.setattr("nsa.kernels.unions.CHUNK", 2)  # fewer than there are slots
    case = Case(lengths, kv_heads=2, slots=4)
    blocks = case.draw()["blocks"]
    _, small, large = nested_unions(blocks, case.sequences(), tokens, pieces)
    assert (large is None) == (pieces == 1)
    for got, step in [(small, tokens), (large, tokens * pieces)][: 2 if large else 1]:
        wanted = unions_written_out(case, blocks, step, tokens * pieces)
        for i, head in product(range(len(wanted)), range(2)):
            count = int(got.counts[i, head])
            assert got.blocks[i, head, :count].tolist() == list(wanted[i][head])
            assert got.members[i, head, :count].tolist() == list(wanted[i][head].values())
        assert not got.counts[len(wanted) :].any()


def unions_written_out(case: Case, blocks: Tensor, step: int, whole: int) -> list:
    """For tiles of `step` tokens, up to a multiple of `whole`, and 2 heads: {block: members}."""
    wanted = []
    for rows, length in zip(rows_of(case.lengths), case.lengths, strict=True):
        for first in range(0, -(-length // whole) * whole, step):
            tile: list[dict[int, int]] = [{}, {}]
            for t, head in product(range(first, min(first + step, length)), range(2)):
                for block in blocks[rows][t, head].tolist():
                    if 0 <= block <= t // case.select_block:
                        tile[head][block] = tile[head].get(block, 0) | 1 << (t - first)
            wanted.append(tile)
    return wanted


def test_a_union_of_more_tokens_than_bits_is_refused():
    case = Case((40,))
    with pytest.raises(ValueError, match="a tile of a union holds 1 to 32 tokens, got 33"):
        unions(case.draw()["blocks"], case.sequences(), 33)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("lengths", [(37,), (14, 14), (5, 0, 14, 18)])
def test_the_inverse_lists_a_blocks_tokens_ascending_and_cuts_them_into_tasks(
    lengths, scanned, monkeypatch
):
    # Fewer lists, slots and tokens at a time than there are.
    monkeypatch.setattr("nsa.kernels.inverse.CHUNK", 4)
    monkeypatch.setattr("nsa.kernels.inverse.SCAN", 16)
    case, task = Case(lengths, kv_heads=2, slots=4), 3
    blocks, sequences = case.draw()["blocks"], case.sequences()
    got = inverse(blocks, sequences, task, scanned=scanned)
    wanted = choosers(case, blocks)
    begin, partial = 0, 0
    for number, tokens in enumerate(wanted):
        assert got.tokens[got.starts[number] : got.stops[number]].tolist() == tokens
        tasks, end = -(-len(tokens) // task), int(got.ends[number])
        assert end - begin >= max(tasks, 1)
        assert set(got.task_list[begin:end].tolist()) == {number}
        if tasks > 1:
            assert partial <= got.partial_ends[number] - tasks
            assert got.partial_ends[number] <= got.partials
            partial = int(got.partial_ends[number])
        begin = end


def choosers(case: Case, blocks: Tensor) -> list[list[int]]:
    """Rows of the tokens that selected each block, KV head by KV head."""
    lists = []
    for head in range(case.kv_heads):
        of_head = []
        for rows in rows_of(case.lengths):
            for block, first in enumerate(range(rows.start, rows.stop, case.select_block)):
                choosing = range(first, rows.stop)
                of_head.append([t for t in choosing if block in blocks[t, head].tolist()])
        lists += of_head + [[]] * (case.sequences().selectable.rows - len(of_head))
    return lists


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 16, 24, 64, 100])
def test_a_large_tile_is_a_whole_number_of_small_ones(group):
    heads, small, large = tile_tokens(group)
    assert large % small == 0
    assert heads * large <= 64


@pytest.mark.parametrize(
    ("group", "blocks", "expected"),
    [(16, 20, 1), (16, 128, 1), (16, 256, 0), (16, 1024, 0), (4, 256, 1), (64, 8, 0)],
)
def test_short_sequences_are_left_to_large_tiles(group, blocks, expected):
    _, small, large = tile_tokens(group)
    slots = torch.zeros(1, 1, 16 * small), torch.zeros(1, 1, 16 * large)
    unions = [Unions(n, x, x, x) for n, x in zip((small, large), slots, strict=True)]
    planned = Plan(group, group, slots[0], unions[0], unions[1] if large > small else None)
    assert planned.always_large(blocks, 3, 1.4) is bool(expected)


@pytest.mark.full
@pytest.mark.parametrize("group", [3, 16, 64])
@pytest.mark.parametrize("lengths", [(37, 37), (5, 0, 14, 18)])
def test_a_plan_that_was_kept_is_the_plan(group, lengths):
    case = Case(lengths, group=group, kv_heads=2)
    blocks, sequences = case.draw()["blocks"], case.sequences()
    made = plan(blocks, sequences, group)
    kept = kept_plan(made.workspace.clone(), blocks, sequences, group)
    assert (kept.heads, kept.pieces) == (made.heads, made.pieces)
    for size in ("small", "large") if made.large else ("small",):
        one, other = getattr(made, size), getattr(kept, size)
        assert one.tokens_per_tile == other.tokens_per_tile
        assert torch.equal(one.counts, other.counts)
        written = torch.arange(one.blocks.shape[2]) < one.counts[..., None]
        assert torch.equal(one.blocks[written], other.blocks[written])
        assert torch.equal(one.members[written], other.members[written])
        assert all(x.data_ptr() % 16 == 0 for x in one.tensors())


def test_the_size_of_tiles_that_is_left_out_is_not_launched():
    given, planned, sequences = planned_for(Case((40,), group=4))
    of = given["q"], given["k"], given["v"], planned, sequences
    for cost, sizes in ((0.1, [True]), (100.0, [False, True])):
        made = launches("forward", *of, None, cost, None, None)
        assert [launch.walk.large for launch in made] == sizes


@pytest.mark.parametrize("dim", [16, 64, 128, 192, 256])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_what_descriptors_fetch_has_two_stages(kernel, dim):
    """With one, Triton 3.6 lets TMA use a barrier that it does not know of yet."""
    x = torch.zeros(1, 1, dim, dtype=torch.float16)
    for rows in (16, 32, 64):
        assert default_tile(kernel, rows, x, x, select_block=64).stages > 1
    span = compressed_span(NSAConfig()), window_span(NSAConfig())
    assert all(span_tile(kernel, dim, one, x).stages > 1 for one in span)
