"""Statements of the case study's research notes on torch, each tried alone."""

import itertools
import warnings

import torch
from torch.nn.functional import one_hot
from torch.nn.functional import scaled_dot_product_attention as attend


def test_a_boolean_mask_is_true_where_a_query_sees_and_its_negation_hides_the_last_row_whole():
    q, k = torch.randn(2, 1, 1, 6, 8)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    right = attend(q, k, torch.eye(6)[None, None], attn_mask=seen)[0, 0]
    assert right.isfinite().all() and not right.triu(1).any()
    written_out = (q @ k.mT).masked_fill(seen, -torch.inf).softmax(-1)[0, 0, -1]
    assert written_out.isnan().all()


def test_a_dense_mask_of_minus_infinity_has_the_gradients_of_attention_row_by_row():
    q, k, v, weight = torch.randn(4, 1, 2, 32, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = torch.zeros(32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)
    rows = [attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(32)]
    outs = attend(q, k, v, attn_mask=bias), torch.cat(rows, dim=2)
    one, other = (torch.autograd.grad((out * weight).sum(), leaves) for out in outs)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_gradients_of_duplicate_indices_gather_in_every_form():
    source, weight = torch.randn(24, 8, requires_grad=True), torch.randn(6, 8)
    index = torch.arange(24) % 6
    outs = (
        one_hot(index, 6).float().T @ source,
        torch.zeros(6, 8).index_add(0, index, source),
        torch.zeros(6, 8).index_add_(0, index, source),
        torch.zeros(6, 8).scatter_add(0, index[:, None].expand(-1, 8), source),
    )
    dense, *others = [torch.autograd.grad((out * weight).sum(), source)[0] for out in outs]
    for other in others:
        torch.testing.assert_close(other, dense)
    taken = torch.randn(6, 8, requires_grad=True)
    pair = [torch.autograd.grad((out * source.detach()).sum(), taken)[0]
            for out in (one_hot(index, 6).float() @ taken, taken[index])]  # fmt: skip
    torch.testing.assert_close(*pair)


def test_packed_sequences_of_several_lengths_attend_as_one_by_one():
    lengths = (5, 17, 9)
    q, k, v, weight = torch.randn(4, sum(lengths), 2, 32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = [*itertools.accumulate(lengths, initial=0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        jagged = [torch.nested.nested_tensor_from_jagged(x, torch.tensor(ends)).transpose(1, 2)
                  for x in leaves]  # fmt: skip
        packed = attend(*jagged).transpose(1, 2).values()
        rows = [attend(*(x[a:b].transpose(0, 1)[None] for x in leaves))[0].transpose(0, 1)
                for a, b in itertools.pairwise(ends)]  # fmt: skip
        apart = torch.cat(rows)
        torch.testing.assert_close(packed, apart)
        pairs = [torch.autograd.grad((out * weight).sum(), leaves) for out in (packed, apart)]
    torch.testing.assert_close(*pairs)


def test_scores_that_only_pick_indices_leave_nothing_in_the_graph():
    x, values = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True)

    def loss(y):
        best = (y @ y.T).softmax(-1).topk(4, dim=-1).indices
        assert not best.requires_grad
        return (values[best].mean(1) * x).sum()

    pair = [torch.autograd.grad(loss(y), (x, values)) for y in (x, x.detach())]
    torch.testing.assert_close(*pair, rtol=0, atol=0)
