"""Steps that take long and do not hang: what a timeout alone would call so."""

import hashlib
import time
from typing import Any

import torch
from torch import Tensor

from nsa.experiments.selfcheck.faults.small import Small, TinyNSA


class Slow(TinyNSA):
    """Healthy and slow: attention one token at a time, at 100 % of a core.

    Its stacks are alike whenever one looks. settings: tokens, of a sequence.
    """

    config = TinyNSA.config.with_(backend="sequential")

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        times = self.settings["tokens"] // inputs.shape[1]
        return inputs.repeat(1, times), targets.repeat(1, times)


class SlowLoader(Small):
    """Each batch takes settings["sleep_s"] to come."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.settings["sleep_s"])
        return super().fetch(step)


class Recompiles(Small):
    """Data is prepared by compiled code with a number in it that changes: compiled each time."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        torch._dynamo.config.recompile_limit = 10**6
        self.compiled = torch.compile(_scaled, backend="eager", dynamic=False)

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        return self.compiled(inputs, step + 2), targets


class CompilesOnce(Small):
    """Healthy: the first step compiles, the others do not."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.called = torch.compile(self.model, backend="aot_eager", dynamic=False)


class LongCall(Small):
    """Healthy: one call into C, without the GIL, for settings["call_s"] seconds in one step."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step == 1:
            began = time.perf_counter()  # not CPU time: others may want the core as well
            _work(300_000)
            rate = 300_000 / (time.perf_counter() - began)
            _work(int(rate * self.settings["call_s"]))
        return super().forward(step, inputs, targets)


class LateStart(Small):
    """Healthy: nothing is told of progress for the first settings["start_s"] seconds."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        time.sleep(settings["start_s"])
        super().__init__(settings, progress)


class Stranger:
    """Healthy: a step of somebody who has never heard of progress, and has no `model` to show."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._net = torch.nn.Linear(8, 1)

    def step(self, step: int) -> Tensor:
        loss = self._net(torch.ones(4, 8)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self._net.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        return loss.detach()


def _scaled(inputs: Tensor, number: int) -> Tensor:
    return inputs * number / (1 + number)


def _work(rounds: int) -> None:
    hashlib.pbkdf2_hmac("sha256", b"key", b"salt", rounds)
