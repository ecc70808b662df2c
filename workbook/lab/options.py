"""Options of a training, each declared once: a field with its default and its help, without torch.

`workbook.cli.train` makes an option of every field, Job has those of Options as its own, and
factors of trials take their descriptions from here.
"""

from dataclasses import dataclass
from typing import Any

from workbook.lab.observers.deferred import SAMPLED
from workbook.lab.observers.guard_rules import BOUND
from workbook.lab.training import TrainingSpec, setting


def as_spec(name: str, default: Any = None, **changes: Any) -> Any:
    """Field as TrainingSpec describes it; without a `default` of its own, that one's."""
    found = TrainingSpec.__dataclass_fields__[name]
    default = found.default if default is None else default
    return setting(default=default, **{"told": found.metadata["help"]} | changes)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Options that are fields of TrainConfig; None where the command chooses."""

    steps: int = setting("how many, those of --resume included", 100)
    batch: int = as_spec("batch", 8)
    tokens: int | None = setting("T; by default what the preset is made for", None)
    lr: float = setting("learning rate", 1e-3)
    min_lr: float = setting("where a cosine ends", 0.0)
    schedule: str = setting("after warm-up", "constant", choices=("constant", "cosine"))
    warmup_steps: int = setting("steps to reach the rate", 10, option="--warmup", metavar="STEPS")
    precision: str | None = setting(
        "bf16 on a GPU, fp32 without", None, choices=("fp32", "bf16", "fp16")
    )
    accumulate: int = setting("micro-batches a step", 1, metavar="N")
    compile: bool = as_spec("compile")
    cuda_graph: bool = as_spec("cuda_graph")
    nonfinite: str = setting(
        "a step whose loss or gradient norm is not finite ends the run with its cause (stop, the "
        "default), or is left out and counted (skip); steps that fp16's loss scaler skips are "
        "usual",
        "stop",
        choices=("stop", "skip"),
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options beside the model and its TrainConfig."""

    data: str = setting(
        "text (Python's own library, the default), synthetic, copy, needle, recall, fineweb-edu, "
        "or a file or folder; of text shards the training split",
        "text",
        metavar="DATA",
    )
    seed: int = as_spec("seed")
    device: str = setting("where", "auto", choices=("auto", "cpu", "cuda"))
    ranks: int = setting("start so many processes on this host", 1, metavar="N")
    kind: str = setting(
        "ddp with --ranks, else none",
        "none",
        choices=TrainingSpec.__dataclass_fields__["parallel"].metadata["choices"],
        option="--parallel",
    )
    cp: int = as_spec(
        "cp",
        told="ranks that share each sequence: a divisor of all ranks (docs/parallel.md)",
        metavar="N",
    )
    cp_method: str = setting(
        "how they do: gather (all keys on each rank, the default) or ulysses (heads for tokens)",
        "gather",
        choices=("gather", "ulysses"),
    )
    backend: str | None = setting(
        "nccl on GPUs, gloo on CPUs", None, choices=("gloo", "nccl"), option="--dist-backend"
    )
    static_graph: bool = setting("DDP: every step uses the same parameters", False)
    find_unused: bool = setting("DDP: look for unused parameters each step", False)
    bucket_mb: float = setting("DDP: size of a bucket of gradients", 25.0)
    comm_hook: str = setting(
        "DDP: bf16 averages gradients in bf16, so that half the bytes are sent",
        "none",
        choices=("none", "bf16"),
    )
    gradient_as_bucket_view: bool = setting(
        "DDP: gradients are held beside the buckets, as torch's default has it",
        True,
        option="--no-bucket-view",
    )
    fsdp_blocks: int = setting(
        "FSDP: neighbouring blocks that one collective gathers", 1, least=1, metavar="N"
    )
    fsdp_reshard: bool = setting(
        "FSDP: gathered weights are kept from the forward to the backward",
        True,
        option="--fsdp-keep",
    )
    fsdp_gather: str = setting(
        "FSDP: bf16 gathers linear weights in bf16, as autocast rounds them, so that half the "
        "bytes are sent",
        "fp32",
        choices=("fp32", "bf16"),
    )
    save_every: int | None = setting(
        "checkpoints; the last two are kept", None, least=1, metavar="STEPS"
    )
    weights: bool = setting(
        "keep no checkpoint at the end; by default the last one stays", True, option="--no-weights"
    )
    eval_every: int | None = setting(
        "loss on batches never trained on", None, least=1, metavar="STEPS"
    )
    resume: str | None = setting("a checkpoint, a folder of them, or a run", None, metavar="PATH")
    observe: tuple[str, ...] = setting(
        "csv, tensorboard, arrival, buckets, modules, phases, ranges (for NSight), stats; the "
        "docstring of each says what it costs",
        (),
        metavar="NAME,NAME",
    )
    observe_every: int = setting(
        "from one look of arrival and modules to the next; 1 looks at all",
        SAMPLED,
        least=1,
        metavar="STEPS",
    )
    max_skips: int = setting(
        "with --nonfinite skip: more in a row end the run; 10 by default",
        BOUND,
        least=1,
        metavar="STEPS",
    )
    guard: tuple[str, ...] = setting(
        "warn of it, or stop there: flat (steps without a lower loss), collapse (share of gates in "
        "one branch), zero (looks at which a gradient was 0) or memory (MiB or GiB), as "
        "memory=60GiB:warn,65GiB:stop; NAME=stop takes the usual limit, NAME=off none. Usual are "
        "flat=500:warn, zero=3:warn and, with --observe stats, collapse=0.9:warn",
        (),
        metavar="NAME=LIMIT:ACTION",
        action="append",
    )
    watchdog: str = setting(
        "report, the default: reports when a step takes 5 times the slowest of the last 50 and at "
        "least a minute, with the stacks; nothing is ended",
        "report",
        choices=("report", "off"),
    )
    halt_file: str | None = setting(
        "when it is there the run ends in order; HALT in the run's folder by default",
        None,
        metavar="PATH",
    )
    profile: str = setting(
        "these steps (20:23), or so many, under torch's profiler: a trace for Perfetto in the "
        "run's folder, and tables of time; --memory-snapshot has those of memory",
        "",
        metavar="STEPS",
    )
    memory_snapshot: str = setting(
        "who holds the memory of this step, counted from 0 (by default the second): by category, "
        "module and line of source, before the backward, after it and at the peak; on a GPU also "
        "torch's own snapshot file",
        "",
        metavar="STEP",
        nargs="?",
        const="second",
    )
