"""The training loop: one step for notebooks, trials and torchrun, with observable phases."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa.attention import witness
from nsa.model import saving
from nsa.model.capture import CapturedStep, on_stream
from nsa.model.data import EVALUATION, Data, Device, Share, share_of
from nsa.model.parallel import SINGLE, Parallel, check_gathered
from nsa.model.train_config import TrainConfig, adamw, autocast, check_weights, set_rate
from nsa.parallel.layout import Layout, layout_of

__all__ = ["EVALUATION", "Data", "TrainConfig", "Trainer"]

WARMUP = 3  # steps before a capture: kernels are compiled and tuned, AdamW's state is made
DDP_WARMUP = 11  # DDP times its first ten steps by events, which a graph cannot hold


class Trainer:
    """Trainer of a LanguageModel, one batch per step; every rank of a job runs one.

    Each rank draws the same batch and uses its rows, micro-batch by micro-batch. Losses and
    gradients are means over the scored targets of the whole batch, however it is split; each
    micro-batch needs at least one. Weights, AdamW's states and gradients are fp32; "bf16" and
    "fp16" are autocast over them, and fp16 scales the loss and skips a step that overflows.

    Observers may have on_start(trainer), called once; on_phase(name, step), called at the start of
    "data", "forward", "backward" and "optimizer" and with "end" after the step; on_step(step,
    loss), called after that with this rank's loss still on its device; close(). Each micro-batch
    has a "forward" and a "backward". Gradients exist when "optimizer" starts and are freed at
    "end". A step from a CUDA graph is "data", "graph", "end". Methods are looked up when observers
    are set, so without any a step costs six empty loops, 0.7 us.

    With config.nonfinite a step whose loss or gradient norm is not finite on any rank changes no
    weight on any of them, decided on the device; under "stop" no later step does either. `vitals`,
    [4] fp32 on the device, then hold the last step's loss (a mean over ranks), the gradient's norm
    over the whole model before clipping, fp16's loss scale (else 1), and the share of ranks that
    called `vote`: all ranks read the same, so that they can end after the same step.

    `model` is the unwrapped model, `wrapped` is called: the model, or DDP around it. Raises
    ValueError for weights narrower than fp32, a batch that cannot be split over the ranks, and an
    unsupported CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        config: TrainConfig,
        *,
        device: Device = "cpu",
        observers: Sequence[Any] = (),
        parallel: Parallel = SINGLE,
    ) -> None:
        self.data, self.config, self.parallel = data, config, parallel
        self.device = torch.device(device)
        self._rows = parallel.rows(config.batch, config.accumulate)
        self._multiple = 1  # of the chunks of a sequence on several ranks
        if parallel.cp > 1:
            self._multiple = model.config.nsa.select_block
            padded = check_shared(config, parallel.cp, self._multiple).padded
            if padded > config.tokens:
                warnings.warn(
                    f"tokens={config.tokens} are padded to {padded}; a multiple of "
                    f"{2 * parallel.cp * self._multiple}, twice cp={parallel.cp} blocks of "
                    f"select_block={self._multiple}, needs no padding",
                    stacklevel=2,
                )
        check_weights(model)
        check_gathered(parallel.fsdp_gather, config.precision, config.compile)
        if config.cuda_graph:
            check_capturable(config, self.device, parallel)
        if (config.compile or config.cuda_graph) and model.config.strict:
            raise ValueError(
                "strict=True looks at values in the middle of a step, which compile=True and "
                "cuda_graph=True do not allow; a run without them finds what is not finite"
            )
        if config.seed is not None:
            model.reset_parameters(config.seed)
        self.model = model.to(self.device)
        if config.compile:  # in place: parameters keep their names, blocks share the code
            for block in model.blocks:  # what is sent within a layer stays eager
                block.compile(fullgraph=parallel.cp == 1, dynamic=False)
        self._stream = torch.cuda.Stream(self.device) if config.cuda_graph else None
        with on_stream(self._stream):  # DDP's hooks stay on the stream they are made on
            self.wrapped = parallel.wrap(self.model)
        self.parameters = list(self.model.parameters())  # a walk over 12 layers takes 0.5 ms
        self.optimizer = adamw(self.model, config, self.device)
        # fp16 gradients below 6e-8 would be 0 if the loss were not scaled
        scaled = config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self.vitals: Tensor | None = None
        # Tensors, not Python numbers: a captured step rereads them in each replay.
        self._seed, self._vote = (torch.full((), x, device=self.device) for x in (1.0, 0.0))
        self.steps_done = 0
        self._tried = 0  # attempted steps, skipped ones too; steps_done adds those passed over
        self._captured = self._capture()
        self.observers = observers

    @property
    def observers(self) -> tuple[Any, ...]:
        """Observers of the steps; may be replaced between steps."""
        return self._observers

    @observers.setter
    def observers(self, observers: Iterable[Any]) -> None:
        before = getattr(self, "_observers", ())
        self._observers = tuple(observers)
        self._on_phase = _methods(self._observers, "on_phase")
        self._on_step = _methods(self._observers, "on_step")
        new = [x for x in self._observers if not any(x is known for known in before)]
        for start in _methods(new, "on_start"):
            start(self)

    def vote(self) -> None:
        """Vote to end the training; `vitals` has the votes, starting with the next gradients."""
        self._vote.fill_(1.0)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed no weight (fp16 overflow or not finite). Waits for the device."""
        counts = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        return self._tried - (int(torch.stack(counts).max()) if counts else 0)

    def step(self, step: int) -> Tensor:
        """Train on batch number `step`; return the loss, fp32, without waiting for the device.

        It is this rank's share, whose mean over ranks is the batch's loss: a step has no collective
        except the gradients'.
        """
        with witness.where(step=step):
            self._enter("data", step)
            share = self._share(self.data, step)
            set_rate(self.optimizer, self.config.rate(step))
            if self._captured is None:
                loss, *vitals = self._train_on(share, partial(self._enter, step=step))
            else:
                self._enter("graph", step)
                loss, *vitals = self._captured(*share.tensors())
            self.vitals = vitals[0] if vitals else None
            self._drop_gradients()
            self._enter("end", step)
        self.steps_done = step + 1
        self._tried += 1
        for on_step in self._on_step:
            on_step(step, loss)
        return loss

    def run(self, steps: int) -> list[float]:
        """Train the next `steps` steps; return their losses in nats, means over all ranks.

        Waits for the device once, and has one collective for the losses, at the end. If attention
        outputs were not finite, one RuntimeWarning has the place of the first: at once on a CPU,
        at the end on a GPU. An open `witness.recording()` counts them as well.
        """
        self.model.train()
        with witness.recording() as seen:
            losses = [self.step(self.steps_done) for _ in range(steps)]
            seen.non_finite()  # warns
        return self.parallel.mean(torch.stack(losses)).tolist() if losses else []

    @torch.no_grad()
    def evaluate(
        self, batches: int, *, first_step: int = EVALUATION, data: Data | None = None
    ) -> float:
        """Loss in nats without training, a mean over `batches` batches and all ranks.

        They come from `data`, or the training data, and start at `first_step`, by default beyond
        every training step. Waits for the device once.
        """
        if batches < 1:
            raise ValueError(f"batches={batches} must be at least 1")
        training = self.model.training
        self.model.eval()
        try:
            losses = []
            for step in range(first_step, first_step + batches):
                parts = self._share(data or self.data, step).micro()
                losses.append(sum(self._loss(*part) for part in parts))
        finally:
            self.model.train(training)
        return float(self.parallel.mean(torch.stack(losses).mean()))

    def save(self, path: str | os.PathLike) -> None:
        """Write all that a resumed run needs; a folder gets step-000500.pt. A collective call. The
        file is written atomically: the previous content of `path` stays until then."""
        saving.save(self, path)

    def load(self, path: str | os.PathLike) -> None:
        """Resume bitwise from a file of `save`, or from the newest readable one of a folder.

        On a GPU torch sums an embedding's gradient in any order, so no two trainings are bitwise
        equal, resumed or not, except under `torch.use_deterministic_algorithms(True)`.

        Raises ValueError for a file that is truncated, of another kind, or of another config, with
        the fields that differ; FileNotFoundError if there is none.
        """
        saving.load(self, path)
        self._seed.fill_(1.0)
        self._captured = self._capture()  # the old one reads what was replaced

    def close(self) -> None:
        """Close the observers and release a captured step; close the process group afterwards."""
        for close in _methods(self._observers, "close"):
            close()
        if self._captured is not None:
            self._captured.release()

    def _train_on(self, share: Share, enter: Callable[[str], None]) -> tuple[Tensor, ...]:
        """Forward, backward and optimizer of a batch on the device; return loss and vitals."""
        self._drop_gradients()  # old ones would be accumulated into
        loss, parts, guarded = None, share.micro(), self.config.nonfinite is not None
        for index, part in enumerate(parts):
            with self.parallel.micro(self.wrapped, last=index == len(parts) - 1):
                enter("forward")
                weighed = self._loss(*part)
                enter("backward")
                # A loss that is not finite makes every gradient NaN, on all ranks when they are
                # averaged: the norm, which all ranks have, shows it without another collective.
                seed = weighed.detach() * 0.0 + self._seed if guarded else None
                self.scaler.scale(weighed).backward(seed)
            loss = weighed.detach() if loss is None else loss + weighed.detach()
        enter("optimizer")
        norm = self._clip()
        vitals = (self._look(loss, norm),) if guarded else ()
        self._update(norm if guarded else None)
        self.scaler.update()
        return loss, *vitals

    def _clip(self) -> Tensor | None:
        """Clip the gradient; return its norm before, None if neither clipped nor checked."""
        if self.config.clip is None and self.config.nonfinite is None:
            return None
        self.scaler.unscale_(self.optimizer)
        if self.config.clip is None:
            return self.parallel.norm(self.parameters)
        return self.parallel.clip(self.parameters, self.config.clip)

    def _look(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Compute the vitals; under "stop" nonfinite ones make the seed of later gradients NaN."""
        mean, votes = self.parallel.mean(torch.stack([loss, self._vote])).unbind()
        scale = self.scaler.scale(torch.ones_like(mean))
        if self.config.nonfinite == "stop":
            # steps skipped by the scaler are normal in fp16
            self._seed.add_((mean if self.scaler.is_enabled() else norm) * 0.0)
        return torch.stack([mean, norm.float(), scale, votes])

    def _update(self, norm: Tensor | None) -> None:
        """Run AdamW's step, without effect if the norm is not finite."""
        optimizer = self.optimizer
        if norm is None or self.scaler.is_enabled():
            self.scaler.step(optimizer)  # a fused AdamW skips on the device
        elif self.device.type == "cuda":
            optimizer.grad_scale, optimizer.found_inf = None, (~norm.isfinite()).float()
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif norm.isfinite():
            optimizer.step()

    def _loss(self, tokens: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        with autocast(self.config.precision, self.device):
            _, loss = self.wrapped(tokens, targets)
        return loss if weight is None else loss * weight

    def _share(self, data: Data, step: int) -> Share:
        batch = data.batch(step, self.config.batch, self.config.tokens)
        share = share_of(*batch, self.parallel, self.config.accumulate, self._rows, self._multiple)
        return share.to(self.device)

    def _capture(self) -> CapturedStep | None:
        if not self.config.cuda_graph:
            return None

        def body(*given: Tensor) -> tuple[Tensor, ...]:
            share = Share(*given, accumulate=self.config.accumulate)
            # A graph has no phases: what observers do must not be captured.
            return self._train_on(share, enter=lambda phase: None)

        return CapturedStep(body, self._stream, warmup_steps(self.parallel))

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _enter(self, phase: str, step: int) -> None:
        for on_phase in self._on_phase:
            on_phase(phase, step)


def _methods(observers: Iterable[Any], name: str) -> tuple[Any, ...]:
    return tuple(getattr(x, name) for x in observers if hasattr(x, name))


def warmup_steps(parallel: Parallel) -> int:
    """Number of eager steps before the captured one."""
    return DDP_WARMUP if parallel.kind == "ddp" else WARMUP


def check_shared(config: TrainConfig, cp: int, multiple: int) -> Layout:
    """Layout of a sequence over `cp` ranks, with chunks of a multiple of `multiple` tokens.

    Raises ValueError for too few tokens, and for what sequences on several ranks cannot have.
    """
    if config.cuda_graph:
        raise ValueError(
            f"cuda_graph=True with cp={cp}: collectives within a layer are not captured; "
            "cuda_graph=False would do"
        )
    return layout_of(config.tokens, cp, multiple)


def check_capturable(config: TrainConfig, device: torch.device, parallel: Parallel) -> None:
    """Raise ValueError, with the reason, if a whole step cannot be a CUDA graph."""
    ddp = parallel.kind == "ddp" and dist.is_initialized()
    sent_by = dist.get_backend() if ddp else "nccl"
    reasons = {
        f"needs a CUDA device, got device={str(device)!r}": device.type != "cuda",
        "with precision='fp16': the loss scaler's decisions are not captured; precision='bf16' "
        "needs no scaler": config.precision == "fp16",
        "with parallel='fsdp': FSDP2 gathers and frees parameters by the host's hand in every "
        "step; parallel='ddp' would do, or cuda_graph=False": parallel.kind == "fsdp",
        "with find_unused_parameters=True: the host reads in every step what was unused; "
        "static_graph=True finds it once": parallel.find_unused_parameters,
        f"with comm_hook={parallel.comm_hook!r}: its casts run in callbacks, which were never seen "
        "captured; comm_hook='none' would do": parallel.comm_hook != "none",
        f"with backend={sent_by!r}: only NCCL's collectives can be captured; backend='nccl' "
        "would do": "nccl" not in sent_by,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"cuda_graph=True {reason}")
