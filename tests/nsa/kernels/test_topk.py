"""The fused selection: the exact facts of Eq. 8-11, and no less importance kept than exactly."""

import pytest
import torch
from backend_calls import DEVICE
from cases import EVEN, ODD, SMALL, TINY
from kernel_inputs import DTYPES, means, normal, rows_of, sequences_of
from selection_cases import assert_selects_as_well, scores

from nsa.blocks import compressed_span, count_compressed
from nsa.config import NSAConfig
from nsa.kernels.span_fwd import span_forward
from nsa.kernels.tiles import Tile
from nsa.kernels.topk import select_blocks
from nsa.reference.nsa import compressed_visible
from nsa.reference.select import importance, select

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

SPAN_TILE, TILE = Tile(16, 16, 4, 1), Tile(16, 32, 4, 1)
# One token a stride; a selectable block is longer than a tile of keys; one block a token.
FINE = NSAConfig(3, 1, 6, 4, window=6)
LONG = NSAConfig(4, 1, 64, 3, window=6)
MANY = NSAConfig(2, 2, 4, 16, select_initial=2, select_local=3, window=6)
SMALLEST = NSAConfig(1, 1, 1, 1, select_initial=0, select_local=1, window=1)


def chosen(q, k_cmp, lengths, config, scale=0.25, tile=TILE):
    """The kernel's blocks for sequences of the given lengths."""
    sequences = sequences_of(lengths, config)
    spare = sequences.compressed.rows - len(k_cmp)
    k_cmp = torch.nn.functional.pad(k_cmp, (0, 0, 0, 0, 0, spare), value=float("nan"))
    axes = sequences.tokens, sequences.compressed
    span = compressed_span(config)
    _, lse2 = span_forward(q, k_cmp, k_cmp, span, *axes, scale, tile=SPAN_TILE)
    return select_blocks(q, k_cmp, lse2, sequences, scale, tile=tile)


def check(lengths, config, group, dtype, kv_heads=1, dim=16, tile=TILE):
    q = normal(sum(lengths), kv_heads * group, dim, dtype=dtype)
    k = normal(sum(lengths), kv_heads, dim, dtype=dtype)
    k_cmp = means(k, lengths, config)
    got = chosen(q, k_cmp, lengths, config, tile=tile)
    assert got.dtype == torch.int32 and got.shape == (len(q), kv_heads, config.select_count)
    key_lengths = [count_compressed(length, config) for length in lengths]
    for rows, keys in zip(rows_of(lengths), rows_of(key_lengths), strict=True):
        if rows.start < rows.stop:
            exact = scores(q[rows], k_cmp[keys], config)
            assert_selects_as_well(got[rows], exact, config, dtype)


KEPT = {
    "tiny": (TINY, 70), "small": (SMALL, 220), "odd": (ODD, 130), "even": (EVEN, 50),
    "fine": (FINE, 50), "long": (LONG, 280), "many": (MANY, 80),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "tokens", "dtype"),
    [
        # The longest takes 10 s interpreted, in each dtype.
        pytest.param(
            *of, dtype, id=f"{of_name}-{name}",
            marks=[pytest.mark.long] * (of_name == "long" and name != "bf16"),
        )
        for of_name, of in KEPT.items()
        for name, dtype in DTYPES.items()
    ],
)  # fmt: skip
def test_keeps_as_much_importance_as_the_exact_selection(config, tokens, dtype):
    check((tokens,), config, 3, dtype)


@pytest.mark.parametrize("dim", [24, pytest.param(40, marks=pytest.mark.full)])
def test_any_head_dim_and_batch(dim):
    check((50, 50), TINY, 3, torch.float32, kv_heads=2, dim=dim)


@pytest.mark.parametrize("tile", [Tile(16, 16, 4, 1), Tile(32, 64, 4, 1), Tile(64, 128, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_any_tile(tile, dtype):
    check((90,), TINY, 2, dtype, tile=tile)


@pytest.mark.parametrize(
    ("lengths", "config", "group"),
    [
        *(pytest.param((70,), TINY, group, marks=pytest.mark.full) for group in (1, 6, 16)),
        pytest.param((40,), SMALLEST, 2, id="one slot: a query's own block"),
        pytest.param((1, 1), TINY, 2, id="no compressed key"),
        pytest.param((3, 3), TINY, 2, id="no compressed key but soon"),
    ],
)
def test_any_group_selects_together_what_is_legal(lengths, config, group):
    check(lengths, config, group, torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("config", [TINY, ODD], ids=["tiny", "odd"])
def test_packed_sequences_select_as_if_alone(config):
    lengths = (61, 1, 0, 3, 75, 0)
    check(lengths, config, 2, torch.float32)
    q, k = normal(sum(lengths), 2, 16), normal(sum(lengths), 1, 16)
    together = chosen(q, means(k, lengths, config), lengths, config)
    for rows, length in zip(rows_of(lengths), lengths, strict=True):
        if length:
            alone = chosen(q[rows], means(k[rows], (length,), config), (length,), config)
            assert torch.equal(together[rows], alone)


def test_enough_slots_for_all_blocks_select_all_that_are_legal():
    config = NSAConfig(4, 2, 8, 9, window=6)
    got = chosen(normal(70, 2, 16), normal(34, 1, 16), (70,), config)
    slots = torch.arange(9, dtype=torch.int32, device=DEVICE)
    own = torch.arange(70, device=DEVICE)[:, None, None] // 8
    assert torch.equal(got, torch.where(slots <= own, slots, -1))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("config", [TINY, ODD, MANY], ids=["tiny", "odd", "many"])
def test_ties_go_to_the_lower_index(config, dtype):
    """Queries of 0 and an lse of 0 give every visible key probability 1: importance is counts."""
    tokens, group = 130, 3
    sequences = sequences_of((tokens,), config)
    q = torch.zeros(tokens, group, 16, dtype=dtype, device=DEVICE)
    k_cmp = normal(sequences.compressed.rows, 1, 16, dtype=dtype)
    lse2 = torch.zeros(group, tokens, device=DEVICE)
    got = select_blocks(q, k_cmp, lse2, sequences, 0.25, tile=TILE)
    visible = compressed_visible(torch.arange(tokens), len(k_cmp), config).to(DEVICE, torch.double)
    exact = importance(visible.expand(1, 1, group, -1, -1), config)
    assert torch.equal(got, select(exact, config)[0])


def test_a_compressed_key_that_has_not_ended_has_no_importance():
    """Its score is the largest by far; what it adds would go to a block that is not forced."""
    config = NSAConfig(8, 4, 8, 2, select_initial=0, select_local=1, window=6)
    q, k_cmp = torch.ones(40, 2, 16, device=DEVICE), torch.zeros(9, 1, 16, device=DEVICE)
    k_cmp[1], k_cmp[5] = 0.5, 20.0  # key 5 ends with token 27: query 26 sees keys 0 to 4
    got = chosen(q, k_cmp, (40,), config)
    want = select(scores(q, k_cmp, config)[None], config)[0]
    rows = slice(24, 27)
    assert got[rows, 0].tolist() == want[rows, 0].tolist() == [[1, 3]] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, when interpreted
def test_forced_blocks_and_legal_ones_hold_when_scores_are_not_finite():
    config = NSAConfig(4, 2, 8, 5, window=6)
    q, k_cmp = normal(120, 2, 16), normal(59, 1, 16)
    q[50:60] = float("nan")
    q[60:70] = float("inf")
    k_cmp[40] = float("nan")
    got = chosen(q, k_cmp, (120,), config)
    own = torch.arange(120, device=DEVICE) // 8
    for t in range(120):
        row, legal = got[t, 0].tolist(), int(own[t]) + 1
        assert row == sorted(set(row) - {-1}) + [-1] * row.count(-1)
        assert sum(j >= 0 for j in row) == min(5, legal) and max(row) <= own[t]
        assert {0, int(own[t]), max(0, int(own[t]) - 1)} <= set(row)
    # NaN in every score: the lowest indices follow the forced ones.
    assert got[58, 0].tolist() == [0, 1, 2, 6, 7]
    before = chosen(q[:50], k_cmp[:24], (50,), config)
    assert torch.equal(got[:50], before)


def test_strided_queries_are_read_where_they_are():
    q = normal(3, 50, 24)[..., :16].transpose(0, 1)
    k_cmp = normal(2, 24, 16).transpose(0, 1)[:, :1]
    got = chosen(q, k_cmp, (50,), TINY)
    assert torch.equal(got, chosen(q.contiguous(), k_cmp.contiguous(), (50,), TINY))
