"""Small trainings of strangers, each with one thing wrong, for the oracles to find."""

import gc
from itertools import count

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbook.lab.oracles import Watch

SIZE = 8


def asked(make, *names, steps=4, settings=None, twice=False):
    """Findings of the oracles in a training; `twice`: they may make it anew."""
    settings = settings or {}
    subject = make(settings)
    remade = (lambda changes: make({**settings, **changes})) if twice else None
    with Watch(names, subject, settings) as seen:
        for i in range(steps):
            seen.begin(i)
            loss = subject.step(i)
            seen.end(i, loss)
            del loss
        return seen.results(remade)


class Plain:
    """Two linear layers, SGD, in a step function that tells nobody anything."""

    def __init__(self, settings=None, progress=None):
        torch.manual_seed(0)
        self.settings = settings or {}
        self.device = self.settings.get("device", "cpu")
        self.model = self.build().to(self.device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-2)

    def build(self):
        return nn.ModuleDict({"first": nn.Linear(SIZE, SIZE), "second": nn.Linear(SIZE, 1)})

    def step(self, i):
        self.optimizer.zero_grad()
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(i))
        loss = self.loss(i, x.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.after(i, loss)
        return loss

    def loss(self, i, x):
        return self.model["second"](self.hidden(i, x)).square().mean()

    def hidden(self, i, x):
        return self.model["first"](x).tanh()

    def after(self, i, loss):
        pass


class Detached(Plain):
    """The first layer has a gradient until a certain step."""

    until = 0

    def hidden(self, i, x):
        found = super().hidden(i, x)
        return found if i < self.until else found.detach()


class DetachedLate(Detached):
    until = 2


class Expected(Detached):
    """Says that the first layer rightly has none."""

    without_gradient = frozenset({"first.weight", "first.bias"})


class TimesZero(Plain):
    """The first layer's gradient is zero, as a new adapter's is before it."""

    def hidden(self, i, x):
        return x + 0 * super().hidden(i, x)


class ZeroAtFirst(Plain):
    """The first layer's gradient is zero in the first step alone: the second begins at zero."""

    def build(self):
        made = super().build()
        nn.init.zeros_(made["second"].weight)
        return made

    def loss(self, i, x):
        return (super().loss(i, x) - 1).square() + (
            self.model["second"](self.hidden(i, x)) - 1
        ).mean()


class NotFinite(Plain):
    """An infinity that the loss does not show."""

    def loss(self, i, x):
        loss = super().loss(i, x)
        return loss + (self.model["first"].bias * 0).sqrt().sum() if i == 2 else loss


class Spoilt(Plain):
    """A weight is infinite at the end."""

    def after(self, i, loss):
        if i == 3:
            self.model["second"].weight.data.fill_(float("inf"))


class NoOptimizer(Plain):
    """The update is written out, and the gradients are gone when a step has ended."""

    def step(self, i):
        loss = self.loss(i, torch.ones(2, SIZE))
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 1e-2 * parameter.grad
                parameter.grad = None
        return loss.detach()


class Keeps(Plain):
    """Keeps something of each step: what `kept` makes of it."""

    def build(self):
        self.all = []
        return super().build()

    def after(self, i, loss):
        self.all.append(self.kept(i, loss))

    def kept(self, i, loss):
        return torch.full((2**16,), float(i), device=self.device)


class KeepsMuch(Keeps):
    """2 MiB a step."""

    def kept(self, i, loss):
        return torch.full((2**19,), float(i))


class KeepsLosses(Keeps):
    def kept(self, i, loss):
        return loss


class KeepsNumbers(Keeps):
    """A loss for each step, for a curve: no leak."""

    def kept(self, i, loss):
        return loss.detach()


class KeepsCycles(Keeps):
    """Two objects that hold each other and a tensor, in a process without a collector."""

    def build(self):
        gc.disable()
        return super().build()

    def after(self, i, loss):
        first = {"tensor": super().kept(i, loss)}
        first["other"] = {"other": first}

    @staticmethod
    def close():
        gc.enable()


class CollectsCycles(KeepsCycles):
    def after(self, i, loss):
        super().after(i, loss)
        if i % 4 == 3:
            gc.collect()


class OneAllocation(Keeps):
    """Kept once, late."""

    def after(self, i, loss):
        if i == 12:
            self.all.append(torch.ones(2**20))


class GrowingGraph(Plain):
    """A number that each step is made of the last one's."""

    average = 0.0

    def loss(self, i, x):
        self.average = self.model["second"].bias - self.average
        return (self.model["second"](self.hidden(i, x)) - self.average).square().mean()


class VaryingGraph(Plain):
    """Rows of other lengths: graphs that differ and do not grow."""

    def loss(self, i, x):
        return sum(super(VaryingGraph, self).loss(i, x) for _ in range(1 + (7 * i) % 5))


class Recomputed(Plain):
    """A checkpointed block that, when spoilt, is another one as it is recomputed."""

    calls = 0

    def hidden(self, i, x):
        return checkpoint(self._hidden, x, use_reentrant=self.settings.get("reentrant", False))

    def _hidden(self, x):
        self.calls += 1
        x = self.model["first"](x)
        spoilt = self.settings.get("spoilt") and self.calls % 2 == 0
        return x.sigmoid() if spoilt else x.tanh()

    def loss(self, i, x):
        return super().loss(i, x.requires_grad_())


class Random(Recomputed):
    """Differs from itself, so that no difference tells anything."""

    made = count(1)

    def build(self):
        self.factor = float(next(Random.made))
        return super().build()

    def _hidden(self, x):
        return self.model["first"](x) * self.factor


class Ways(Plain):
    """One function in several ways, one of them a little wrong."""

    def hidden(self, i, x):
        layer, way = self.model["first"], self.settings["backend"]
        if way == "written out":
            return (x @ layer.weight.T + layer.bias).tanh()
        return super().hidden(i, x) * (1.01 if way == "wrong" else 1)


class Tokens(Plain):
    """Attention over settings["tokens"], or what keeps no more than a row a token."""

    def build(self):
        return nn.ModuleDict({"first": Mixing(), "second": nn.Linear(SIZE, 1)})

    def loss(self, i, x):
        x = torch.randn(self.settings["tokens"], SIZE, device=self.device)
        return self.model["second"](self.model["first"](x, self.settings["dense"])).mean()


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Linear(SIZE, SIZE)

    def forward(self, x, dense):
        x = self.by(x)
        return (x @ x.T).softmax(-1) @ x if dense else x.tanh()


class Searches(Plain):
    """Keeps a number of each step, and looks through all of them in each."""

    def build(self):
        self.seen, self.looked_at = [], 0
        return super().build()

    def after(self, i, loss):
        self.seen += [i] * 2_000
        self.looked_at += sum(1 for _ in self.seen)


class Forgotten(Plain):
    """A scale that is made when the optimizer is already there."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        self.model["scale"] = nn.ParameterDict({"by": nn.Parameter(torch.ones(SIZE))})

    def hidden(self, i, x):
        return super().hidden(i, x) * self.model["scale"]["by"]


class TwoOptimizers(Forgotten):
    """Gives it to a second optimizer, which is called in the last step only."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        self.second = torch.optim.SGD(self.model["scale"].parameters(), lr=0.1)


class RateOfZero(Plain):
    """A group of its own for the first layer, with a learning rate of 0."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        first, second = (self.model[name].parameters() for name in ("first", "second"))
        self.optimizer = torch.optim.SGD([{"params": first, "lr": 0.0}, {"params": second}], lr=0.1)


class Rounded(Plain):
    """bf16 weights of 1 and more, with steps that are too small for them, and a bias that moves."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        self.model.bfloat16()
        nn.init.ones_(self.model["second"].weight)
        nn.init.zeros_(self.model["second"].bias)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)

    def loss(self, i, x):
        return super().loss(i, x.bfloat16())


class DeadHeads(Plain):
    """One of two heads is multiplied by 0 before the output."""

    def build(self):
        return nn.ModuleDict({"first": nn.Linear(SIZE, 16), "second": nn.Linear(16, 1)})

    def hidden(self, i, x):
        return super().hidden(i, x) * torch.cat([torch.ones(8), torch.zeros(8)])


class Explodes(Plain):
    """Finite, and larger in each step."""

    def loss(self, i, x):
        return super().loss(i, x) + 1.5**i


class Learns(Plain):
    def loss(self, i, x):
        return super().loss(0, torch.ones(4, SIZE))


class Stays(Plain):
    """Noise around 1, whatever it does."""

    def loss(self, i, x):
        return 0 * super().loss(i, x) + 1 + 0.1 * x.mean()
