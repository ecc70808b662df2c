"""A backward counted by what modules put out, and where that does not do."""

import pytest
import torch
from counted import here, nodes_of
from torch import nn

from nsa.lab.watch import Progress, counting


@pytest.fixture
def counters(tmp_path):
    made = Progress(tmp_path / "progress.bin")
    yield made
    made.close()


class Scaled(nn.Module):
    """`nodes` products, one of which tells `seen` when its backward runs."""

    def __init__(self, nodes, seen=None):
        super().__init__()
        self.nodes, self.seen = nodes, seen

    def forward(self, x):
        for _ in range(self.nodes):
            x = x * 1.0
        if self.seen is not None:
            x.register_hook(lambda _: self.seen())
        return x


def test_where_modules_are_small_their_outputs_count_the_nodes(counters, monkeypatch):
    during, walked = [], []
    walk = counting._nodes
    monkeypatch.setattr(counting, "_nodes", lambda *given: walked.append(1) or walk(*given))
    layers = [Scaled(3) for _ in range(60)]
    layers[29] = Scaled(3, lambda: during.append(here(counters)))
    model = nn.Sequential(*layers)
    x = torch.ones(4, requires_grad=True)
    for watched in (True, False):  # of this model alone, and by whoever attaches
        counters.watch(model) if watched else counters.attach()
        for step in range(3):
            counters.step(step)
            model(x).sum().backward()
            assert here(counters).fired == here(counters).total == 181
        assert len(walked) == 2 - watched  # the first of each: nobody knew how far apart they lie
    assert len(during) == 6
    for p in during:
        assert (p.phase, p.total) == ("backward", 181) and 80 <= p.fired <= 98


def test_a_backward_that_takes_long_is_counted_more_finely_from_then_on(counters, monkeypatch):
    counters.attach()
    during = []
    layers = [Scaled(20) for _ in range(8)]
    model, x = nn.Sequential(*layers), torch.ones(4, requires_grad=True)

    def stages():
        """How many counts are seen while one module's 20 nodes run."""
        during.clear()
        y = model(x)
        for node in nodes_between(y, 65, 85):
            node.register_prehook(lambda _: during.append(here(counters).fired))
        y.sum().backward()
        return len(set(during))

    stages()
    assert stages() <= 2
    monkeypatch.setattr(counting, "SHORT_S", 0.0)
    stages()
    assert stages() >= 19


def nodes_between(y, first, last):
    """Of a chain of nodes, those that run in these places."""
    node, chain = y.grad_fn, []
    while node is not None and node.next_functions:
        chain.append(node)
        node = node.next_functions[0][0]
    return chain[first:last]


def test_modules_far_apart_are_counted_by_a_walk(counters):
    counters.attach()
    during = []
    model = nn.Sequential(Scaled(3), Scaled(200, lambda: during.append(here(counters))), Scaled(3))
    deep = nn.Sequential(*(Scaled(1) for _ in range(100)))
    x = torch.ones(4, requires_grad=True)
    for step in range(4):
        counters.step(step)
        loss = model(deep(x) if step % 2 else x).sum()
        expected = nodes_of(loss)
        loss.backward()
        assert here(counters).fired == here(counters).total == expected
    assert [p.total for p in during] == 2 * [207, 307]
    assert not counters.outputs._hooks  # none is paid for in vain


def test_where_a_walk_counts_outputs_do_not(counters):
    counters.attach()
    seen = []
    near = nn.Sequential(*(Scaled(2, lambda: seen.append(here(counters))) for _ in range(50)))
    x = torch.ones(4, requires_grad=True)
    for step, far in enumerate((Scaled(60), Scaled(60), Scaled(200))):  # the last was not foreseen
        counters.step(step)
        seen.clear()
        far(near(x)).sum().backward()
    assert len(seen) == 50
    assert all(200 <= p.fired <= p.total == 301 for p in seen)
    assert [p.fired for p in seen] == sorted(p.fired for p in seen)
    assert seen[24].fired == pytest.approx(251, abs=3)


def test_a_forward_counts_in_its_own_backward_alone(counters):
    counters.attach()
    model = nn.Sequential(*(Scaled(2) for _ in range(100)))
    x = torch.ones(4, requires_grad=True)
    model(x).sum().backward()
    counters.step(0)
    first, second = model(x).sum(), model(x).sum()
    first.backward(retain_graph=True)
    assert here(counters).fired == here(counters).total == 402  # two forwards were made
    for n, loss in enumerate((first, second), 1):  # and are walked from now on
        loss.backward()
        assert here(counters).fired == here(counters).total == 402 + 201 * n
    for step in range(2):
        model(x)  # whose backward never comes
        counters.step(step)
        model(x).sum().backward()
        assert here(counters).fired == here(counters).total == 201
