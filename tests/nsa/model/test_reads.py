"""Keys read, counted one by one and by the formula."""

import pytest
import torch

from nsa.config import NSAConfig
from nsa.model.reads import by_branch, keys_read
from nsa.reference.nsa import nsa

CONFIGS = [
    NSAConfig(),
    NSAConfig(4, 2, 8, 4, window=8),
    NSAConfig(6, 3, 6, 3, window=1),
    NSAConfig(2, 2, 4, 1, select_initial=0, select_local=1, window=5),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_sums_are_those_of_the_tokens_one_by_one(config):
    sums, lengths = [torch.zeros(3, dtype=torch.int64)], range(3 * 64 + 7)
    for t in lengths:
        compressed = max(0, (t + 1 - config.compress_block) // config.compress_stride + 1)
        blocks = min(config.select_count, t // config.select_block + 1)
        selected = (blocks - 1) * config.select_block + t % config.select_block + 1
        read = torch.tensor([compressed, selected, min(config.window, t + 1)])
        sums.append(sums[-1] + read)
    assert torch.equal(keys_read(torch.tensor([*lengths]), config), torch.stack(sums[:-1]))


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_they_are_what_the_reference_attends_to(config):
    tokens, seen = 43, torch.zeros(3, dtype=torch.int64)
    q, k, v = torch.randn(3, 1, tokens, 1, 4, dtype=torch.float64)
    ones = torch.ones(1, tokens, 1, 3, dtype=torch.float64)
    k, v = (dict.fromkeys(("cmp", "slc", "win"), x) for x in (k, v))
    blocks = nsa(q, k, v, ones, config).blocks[0, :, 0].tolist()
    for t, chosen in enumerate(blocks):
        inside = {s for s in range(t + 1) if s // config.select_block in chosen}
        ended = sum(
            i * config.compress_stride + config.compress_block - 1 <= t for i in range(tokens)
        )
        near = sum(t - config.window < s <= t for s in range(tokens))
        seen += torch.tensor([ended, len(inside), near])
    assert torch.equal(keys_read(torch.tensor([tokens]), config)[0], seen)


def test_a_step_of_the_papers_sizes_at_64k_reads_the_papers_number_of_keys():
    config, t = NSAConfig(), 2**16 - 1
    step = keys_read(torch.tensor([t, t + 1]), config).diff(dim=0)[0]
    assert step.tolist() == [(2**16 - 32) // 16 + 1, 16 * 64, 512]


def test_a_branch_alone_reads_what_it_needs():
    counts = torch.tensor([5, 6, 7])
    assert by_branch(counts, ("win",), layers=2) == {"win": 14}
    assert by_branch(counts, ("slc",)) == {"cmp": 5, "slc": 6}
    assert by_branch(counts, ("cmp", "slc", "win")) == {"cmp": 5, "slc": 6, "win": 7}
