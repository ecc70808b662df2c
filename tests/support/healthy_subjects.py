"""Trainings of strangers that are as they should be, and look as if something were wrong."""

import copy
import random

import torch
from oracle_subjects import SIZE, Plain
from torch import nn
from torch.nn import functional as F

VOCABULARY = 50


class Tied(Plain):
    """An embedding that is the output's weight as well."""

    def build(self):
        made = nn.ModuleDict(
            {"embed": nn.Embedding(VOCABULARY, SIZE), "out": nn.Linear(SIZE, VOCABULARY)}
        )
        made["out"].weight = made["embed"].weight
        return made

    def loss(self, i, x):
        tokens = torch.randint(0, VOCABULARY, (16,), generator=torch.Generator().manual_seed(i))
        return F.cross_entropy(self.model["out"](self.model["embed"](tokens)), (tokens + 1) % 50)


class RareTokens(Plain):
    """Most rows of the embedding never come; and a table of positions longer than any text."""

    def build(self):
        made = super().build()
        made["embed"] = nn.Embedding(VOCABULARY, SIZE)
        made["table"] = nn.ParameterDict({"positions": nn.Parameter(torch.zeros(64, SIZE))})
        return made

    def loss(self, i, x):
        tokens = torch.tensor([1, 2, 3, 30 + i % 3])
        x = self.model["embed"](tokens) + self.model["table"]["positions"][:4]
        return super().loss(i, x)


class Experts(Plain):
    """One expert of four for each batch; the last comes once."""

    order = (0, 1, 2, 0, 3, 1, 0, 2, 1, 0, 2, 1)

    def build(self):
        made = super().build()
        made["experts"] = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        return made

    def hidden(self, i, x):
        return super().hidden(i, self.model["experts"][self.order[i % 12]](x))


class Gan(Plain):
    """Two networks and two optimizers; one is trained in every second step only."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        halves = (self.model[name].parameters() for name in ("first", "second"))
        self.generator, self.critic = (torch.optim.Adam(half, lr=1e-3) for half in halves)

    def build(self):
        return nn.ModuleDict({"first": nn.Linear(SIZE, SIZE), "second": nn.Linear(SIZE, 1)})

    def step(self, i):
        x = torch.randn(4, SIZE)
        self.critic.zero_grad()
        score = self.model["second"](self.model["first"](x).detach()) - self.model["second"](x)
        score.mean().backward()
        self.critic.step()
        if i % 2 == 0:
            self.generator.zero_grad()
            loss = -self.model["second"](self.model["first"](x)).mean()
            loss.backward()
            self.generator.step()
        return score.detach().mean()


class FrozenBackbone(Plain):
    """Says that the first layer is not to be trained."""

    def build(self):
        made = super().build()
        made["first"].requires_grad_(False)
        return made


class HeadOnly(Plain):
    """Says so by giving the optimizer the head alone."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        self.optimizer = torch.optim.SGD(self.model["second"].parameters(), lr=1e-2)

    def build(self):
        made = super().build()
        made["middle"] = nn.Linear(SIZE, SIZE)
        return made

    def hidden(self, i, x):
        return super().hidden(i, self.model["middle"](x))

    def after(self, i, loss):
        self.model.zero_grad()


class WarmUp(Plain):
    """A learning rate that begins at 0."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: n / 100)

    def after(self, i, loss):
        self.schedule.step()


class Accumulates(Plain):
    """Three backwards for each call of the optimizer, which is a step of its own."""

    def step(self, i):
        x = torch.randn(4, SIZE)
        loss = self.loss(i, x) / 3
        loss.backward()
        if i % 3 == 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


class Averaged(Plain):
    """Keeps an average of its weights inside the model, as momentum encoders do."""

    def build(self):
        made = super().build()
        made["average"] = copy.deepcopy(made["first"])
        return made

    def after(self, i, loss):
        with torch.no_grad():
            pairs = (self.model[name].parameters() for name in ("average", "first"))
            for mine, theirs in zip(*pairs, strict=True):
                mine.lerp_(theirs, 0.1)


class Skipping(Plain):
    """fp16's scaler leaves out the first two steps, whose gradients overflow."""

    def step(self, i):
        self.optimizer.zero_grad()
        x = torch.randn(4, SIZE)
        loss = self.loss(i, x)
        (loss * (float("inf") if i < 2 else 1)).backward()
        if i >= 2:
            self.optimizer.step()
        return loss.detach()


class Masters(Plain):
    """bf16 weights whose fp32 copies are what the optimizer holds."""

    def __init__(self, settings=None, progress=None):
        super().__init__(settings)
        self.model.bfloat16()
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, lr=1e-3)

    def step(self, i):
        loss = self.loss(i, torch.randn(4, SIZE, dtype=torch.bfloat16))
        loss.backward()
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            p.data.copy_(master)
        return loss.detach()


class SlowAtFirst(Plain):
    """Its first steps compile, and each sixteenth is an evaluation as well."""

    def after(self, i, loss):
        spin(20_000 if i < 4 else 40_000 if i % 16 == 9 else 500)


class Uneven(Plain):
    """Texts of very different lengths."""

    def build(self):
        self.random = random.Random(0)
        return super().build()

    def after(self, i, loss):
        spin(self.random.randrange(500, 8_000))


class Longer(Plain):
    """A curriculum: each batch is larger than the last."""

    def step(self, i):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(200 + 200 * i, SIZE)).square().mean()
        spin(1_000 * (i + 1))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def build(self):
        return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))


class Converges(Plain):
    """To nothing, and then it stays there."""

    def loss(self, i, x):
        return super().loss(i, x) * 0.8**i


def spin(times):
    for _ in range(times):
        pass


HEALTHY = (
    Tied, RareTokens, Experts, Gan, FrozenBackbone, HeadOnly, WarmUp, Accumulates, Averaged,
    Skipping, Masters, SlowAtFirst, Uneven, Longer, Converges,
)  # fmt: skip
