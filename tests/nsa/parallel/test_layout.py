"""Chunks of a sequence: every token on one rank, in halves that balance, padded where they must."""

import pytest
import torch

from nsa.parallel.layout import IGNORED, layout_of, shard_sequence
from nsa.parallel.mesh import ContextParallel


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [4, 24, 29])
def test_the_rows_of_all_ranks_are_the_sequence_in_another_order(ranks, tokens):
    layout = layout_of(tokens, ranks)
    x = torch.arange(2 * tokens).view(2, tokens)
    shards = [layout.shard(x, rank, fill=-1) for rank in range(ranks)]
    assert torch.equal(layout.natural(shards)[:, :tokens], x)
    positions = [layout.positions(rank) for rank in range(ranks)]
    assert torch.cat(positions).sort().values.tolist() == list(range(layout.padded))
    for shard, rows in zip(shards, positions, strict=True):
        real = rows < tokens
        assert torch.equal(shard[:, real], x[:, rows[real]])
        assert (shard[:, ~real] == -1).all()


@pytest.mark.parametrize(("long", "short"), [(28, 28), (28, 4), (27, 13), (6, 0), (1, 1)])
def test_gradients_are_added_where_each_ranks_rows_are_sent_from(long, short):
    layout = layout_of(27, 2, 7)
    given = [torch.randn(2, n, 3, 5, dtype=torch.bfloat16) for n in (long, short)]
    out = torch.full((2, 2, 14, 3, 5), torch.nan)
    layout.add_by_rank(out, *given)
    total = sum(torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, 28 - x.shape[1])) for x in given)
    wanted = [torch.cat([total[:, rows] for rows in layout.chunks(r)], 1) for r in range(2)]
    assert torch.equal(out, torch.stack(wanted))


def test_every_rank_has_as_many_pairs_of_a_query_and_a_key():
    layout = layout_of(4096, 4, 64)
    pairs = [int((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(pairs)) == 1
    assert 4 * pairs[0] == 4096 * 4097 // 2


def test_targets_move_with_their_tokens_and_padding_is_not_scored():
    tokens = torch.arange(100)[None]
    cu_seqlens = torch.tensor([0, 40, 100], dtype=torch.int32)
    for rank in (0, 1):
        found = shard_sequence(
            tokens, tokens + 1, rank=rank, ranks=2, multiple=16, cu_seqlens=cu_seqlens
        )
        assert found.layout.chunk == 32
        assert found.cu_seqlens.tolist() == [0, 40, 100, 128]
        real = found.positions < 100
        assert torch.equal(found.tokens[0, real], found.positions[real])
        assert torch.equal(found.targets[0, real], found.positions[real] + 1)
        assert (found.targets[0, ~real] == IGNORED).all()
    assert shard_sequence(tokens, rank=0, ranks=5, multiple=10).targets is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: shard_sequence(x, rank=2, ranks=2), "rank=2 is not one of 2"),
        (lambda x: shard_sequence(x, x[:, 1:], rank=0, ranks=2), "targets are .1, 99. and tokens"),
        (lambda x: shard_sequence(x, rank=0, ranks=4), "100 tokens are 2 block.s. of 64 and"),
        (lambda x: layout_of(100, 4, 0), "multiple=0 must be at least 1"),
        (lambda x: ContextParallel(ranks=2).layout(7), "7 rows on a rank are not a head and"),
        (lambda x: ContextParallel(method="ring"), "method='ring' is unknown; known are gather"),
        (lambda x: ContextParallel(heads_at_once=0), "heads_at_once=0 must be at least 1"),
        (lambda x: ContextParallel.over("cp"), "needs a DeviceMesh with a dimension 'cp', got str"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_what_would_do(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 100, dtype=torch.int64))
