from collections import Counter

import pytest
import torch
from tiny_models import TOKENS, tiny, tokens

from nsa.config import NSAConfig
from nsa.model.llama import LanguageModel
from nsa.model.presets import dense_twin
from workbook.lab.measure.attention_inputs import mean_union
from workbook.lab.measure.selections import described, selections, union_histogram

CONFIG = NSAConfig(4, 2, select_block=4, select_count=4, select_initial=1, select_local=1)


def drawn(seed=0, tiles=16):
    """Blocks [2, T, 2, 4] of legal, distinct, ascending indices, -1 behind them."""
    random, found = torch.Generator().manual_seed(seed), torch.full((2, 4 * tiles, 2, 4), -1)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, (2, 4 * tiles, 2))).tolist():
        count = min(4, t // 4 + 1)
        chosen = torch.randperm(t // 4 + 1, generator=random)[:count].sort().values
        found[b, t, h, :count] = chosen
    return found.int()


@pytest.mark.parametrize("neighbours", [4, 8])
def test_a_union_histogram_counts_sets_of_neighbours(neighbours):
    blocks = drawn()
    counted = Counter()
    for b in range(2):
        for h in range(2):
            for first in range(0, blocks.shape[1], neighbours):
                tile = blocks[b, first : first + neighbours, h].flatten().tolist()
                counted[str(len(set(tile) - {-1}))] += 1
    found = union_histogram(blocks, neighbours)
    assert found == dict(counted)
    mean = sum(int(n) * count for n, count in found.items()) / sum(found.values())
    assert mean == pytest.approx(mean_union(blocks, neighbours))


def test_what_is_far_forced_or_chosen_anyway_is_counted_by_its_definition():
    blocks = drawn()
    own = (torch.arange(blocks.shape[1]) // 4)[:, None, None]
    far, forced, slots = Counter(), 0, 0
    for index in (blocks >= 0).nonzero().tolist():
        b, t, h, n = index
        block, mine = int(blocks[b, t, h, n]), int(own[t])
        slots += 1
        if block == 0 or block == mine:
            forced += 1
        else:
            far[str(1 << max(0, mine - block - 1).bit_length())] += 1
    free = drawn(1)
    found = described(blocks, free, CONFIG)
    assert found["far"] == dict(far)
    assert found["forced"] == pytest.approx(forced / slots)
    asked = free[:, own[:, 0, 0] >= 4]
    assert found["first_anyway"] == pytest.approx(float((asked == 0).any(-1).float().mean()))
    before = (own - 1)[own[:, 0, 0] >= 4]
    assert found["local_anyway"] == pytest.approx(float((asked == before).any(-1).float().mean()))


def test_every_layer_that_selects_is_described():
    ids = tokens(count=TOKENS)
    found = selections(LanguageModel(tiny()), ids)
    assert len(found) == 2
    for row in found:
        assert sum(row["union"]["4"].values()) == TOKENS // 4 * 2
        assert 0 < row["entropy"] < 1.1 and all(0 < gate < 1 for gate in row["gates"])
    assert len(selections(LanguageModel(tiny(force_branch="slc")), ids)) == 2


@pytest.mark.parametrize("config", [dense_twin(tiny(backend="auto")), tiny(force_branch="win")])
def test_a_model_that_selects_nothing_is_refused(config):
    with pytest.raises(ValueError, match="no layer of the model selects blocks"):
        selections(LanguageModel(config), tokens())
