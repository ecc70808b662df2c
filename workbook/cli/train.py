"""`nsa train`: train a language model in one process, on several ranks, or under torchrun.

An option is stored (`dest`) under the name of the field of Job or TrainConfig that it sets.
"""

import math
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.spelling import settings
from workbook.cli.options import BAD_INPUT, FAILED, GOOD, SEVERAL, command, of_model, share, words
from workbook.lab.observers.deferred import SAMPLED
from workbook.lab.training import TrainingSpec

if TYPE_CHECKING:
    from workbook.rooms.training.job import Job

TOKENS = {
    "production": 2048,
    "memory_table": 2048,
    "smoke": 1024,
    "step5": 1024,
}  # T that the presets are made for
OTHER_TOKENS = 512


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, train)
    option = made.add_argument
    option("--preset", default="production", metavar="NAME", help="production by default")
    text = "a field of the model's config, as backend=triton or nsa.window=64"
    option("--set", metavar="NAME=VALUE", help=text, **SEVERAL)
    text = (
        "text (Python's own library, the default), synthetic, copy, needle, recall, fineweb-edu, "
        "or a file or folder"
    )
    option("--data", default="text", metavar="DATA", help=text)
    option("--steps", type=int, default=100, help="how many, those of --resume included")
    told = {
        name: field.metadata["help"] for name, field in TrainingSpec.__dataclass_fields__.items()
    }
    option("--batch", type=int, default=8, help=told["batch"])
    option("--tokens", type=int, help="T; by default what the preset is made for")
    option("--lr", type=float, default=1e-3, help="learning rate")
    option("--min-lr", type=float, default=0.0, help="where a cosine ends")
    option("--schedule", choices=("constant", "cosine"), default="constant", help="after warm-up")
    text = "steps to reach the rate"
    option("--warmup", type=int, default=10, metavar="STEPS", help=text, dest="warmup_steps")
    option("--precision", choices=("fp32", "bf16", "fp16"), help="bf16 on a GPU, fp32 without")
    option("--accumulate", type=int, default=1, metavar="N", help="micro-batches a step")
    option("--checkpoint", metavar="LAYERS", help="recompute these in the backward: all or 2:8")
    option("--compile", action="store_true", help=told["compile"])
    option("--cuda-graph", action="store_true", help=told["cuda_graph"])
    share(made, "--device")
    option("--seed", type=int, default=1337, help=told["seed"])
    option("--ranks", type=int, metavar="N", help="start so many processes on this host")
    option("--port", type=int, help="where they meet; by default a free one")
    text = "ddp with --ranks, else none"
    option("--parallel", choices=("none", "ddp", "fsdp"), help=text, dest="kind")
    text = "ranks that share each sequence: a divisor of all ranks (docs/parallel.md)"
    option("--cp", type=int, default=1, metavar="N", help=text)
    text = "how they do: gather (all keys on each rank, the default) or ulysses (heads for tokens)"
    option("--cp-method", choices=("gather", "ulysses"), default="gather", help=text)
    text = "nccl on GPUs, gloo on CPUs"
    option("--dist-backend", choices=("gloo", "nccl"), help=text, dest="backend")
    option("--static-graph", action="store_true", help="DDP: every step uses the same parameters")
    option("--find-unused", action="store_true", help="DDP: look for unused parameters each step")
    option("--bucket-mb", type=float, default=25.0, help="DDP: size of a bucket of gradients")
    text = "DDP: bf16 averages gradients in bf16, so that half the bytes are sent"
    option("--comm-hook", choices=("none", "bf16"), default="none", help=text)
    text = "DDP: gradients are held beside the buckets, as torch's default has it"
    option("--no-bucket-view", action="store_false", help=text, dest="gradient_as_bucket_view")
    option("--save-every", type=int, metavar="STEPS", help="checkpoints; the last two are kept")
    text = "keep no checkpoint at the end; by default the last one stays"
    option("--no-weights", action="store_false", dest="weights", help=text)
    option("--eval-every", type=int, metavar="STEPS", help="loss on batches never trained on")
    option("--resume", metavar="PATH", help="a checkpoint, a folder of them, or a run")
    text = (
        "csv, tensorboard, arrival, buckets, modules, phases, ranges (for NSight), stats; what "
        "each costs stands in its docstring"
    )
    option("--observe", type=words, default=[], metavar="NAME,NAME", help=text)
    text = "from one look of arrival and modules to the next; 1 looks at all"
    option("--observe-every", type=int, default=SAMPLED, metavar="STEPS", help=text)
    text = (
        "what a foreign process on the GPU, too little memory or a stale installation does: refuse "
        "(default), warn or off"
    )
    option("--preflight", choices=("refuse", "warn", "off"), default="refuse", help=text)
    text = (
        "a step whose loss or gradient norm is not finite ends the run with its cause (stop, the "
        "default), or is left out and counted (skip); steps that fp16's loss scaler skips are usual"
    )
    option("--nonfinite", choices=("stop", "skip"), default="stop", help=text)
    text = "with --nonfinite skip: more in a row end the run; 10 by default"
    option("--max-skips", type=int, metavar="STEPS", help=text)
    text = (
        "warn of it, or stop there: flat (steps without a lower loss), collapse (share of gates in "
        "one branch), zero (looks at which a gradient was 0) or memory (MiB or GiB), as "
        "memory=60GiB:warn,65GiB:stop; NAME=stop takes the usual limit, NAME=off none. Usual are "
        "flat=500:warn, zero=3:warn and, with --observe stats, collapse=0.9:warn"
    )
    option("--guard", metavar="NAME=LIMIT:ACTION", help=text, **SEVERAL)
    text = (
        "report, the default: tells when a step takes 5 times the slowest of the last 50 and at "
        "least a minute, and where it stands; nothing is ended"
    )
    option("--watchdog", choices=("report", "off"), default="report", help=text)
    text = "when it is there the run ends in order; HALT in the run's folder by default"
    option("--halt-file", metavar="PATH", help=text)
    text = (
        "these steps (20:23), or so many, under torch's profiler: a trace for Perfetto in the "
        "run's folder, and tables of time; --memory-snapshot has those of memory"
    )
    option("--profile", default="", metavar="STEPS", help=text)
    text = (
        "who holds the memory of this step, counted from 0 (by default the second): by category, "
        "module and line of source, before the backward, after it and at the peak; on a GPU also "
        "torch's own snapshot file"
    )
    option("--memory-snapshot", nargs="?", const="second", default="", metavar="STEP", help=text)
    # not --run: torchrun reads that as a prefix of its own --run-path, even behind -m nsa
    option("--into", metavar="DIR", help="this run's folder; by default a new one below --runs")
    share(made, "--runs")


def train(arguments) -> int:
    """Train a language model. --ranks 2 starts two processes and supervises them; torchrun
    --nproc-per-node 2 -m nsa train --parallel ddp works too."""
    under_torchrun = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun else None
    arguments.kind = arguments.kind or ("ddp" if arguments.ranks else "none")
    _check_start(arguments.kind, arguments.ranks, started, arguments.port)
    job = _job(arguments, started)

    from workbook.rooms.training import run as training_run

    places = {"runs": arguments.runs, "given": arguments.into}
    if os.environ.get("RANK", "0") == "0":
        from workbook.rooms.training import preflight

        changed = [text.partition("=")[0].strip() for text in arguments.set]
        where = arguments.into or arguments.runs
        places["preflight"] = preflight.check(job, arguments.preflight, changed, where)
    if under_torchrun and job.kind != "none":
        ended = training_run.under_torchrun(job, sys.argv[1:], **places)
        return _tell(ended) if os.environ["RANK"] == "0" else GOOD
    if arguments.port is not None:
        from whyhung.process.launch import check_port

        check_port(arguments.port)  # before there is a folder
    folder = training_run.make_folder(job, sys.argv[1:], **places)
    print(f"nsa: training into {folder}", file=sys.stderr, flush=True)
    if arguments.ranks is not None:
        return _tell(training_run.supervise(job, folder, arguments.port))
    return _tell(training_run.alone(job, folder))


def _check_start(kind: str, asked: int | None, started: int | None, port: int | None) -> None:
    """Raise ValueError unless only one side starts ranks, and ranks and --parallel agree.

    asked: ranks of --ranks; started: ranks that torchrun has started.
    """
    if asked is not None and started is not None:
        raise ValueError("--ranks starts torchrun itself; under torchrun leave it out")
    if asked is not None and asked < 1:
        raise ValueError(f"--ranks {asked} must be at least 1")
    count = asked or started
    if kind == "none" and (count or 1) > 1:
        raise ValueError(
            f"{count} ranks without --parallel would each train the same model; --parallel ddp "
            "or fsdp shares the batch"
        )
    if kind != "none" and count is None:
        raise ValueError(
            f"--parallel {kind} needs ranks: nsa train --ranks 2 --parallel {kind}, or "
            f"torchrun --nproc-per-node 2 -m nsa train --parallel {kind}"
        )
    if port is not None and asked is None:
        raise ValueError("--port is for --ranks; torchrun has --master-port")


def _job(arguments, started: int | None) -> "Job":
    """Job of the arguments, checked. started: number of ranks that torchrun has started."""
    from nsa.attention import known
    from nsa.model import presets

    if arguments.resume is not None and not Path(arguments.resume).exists():
        from workbook.runs.store import open_store

        try:
            arguments.resume = str(open_store(arguments.runs).find(arguments.resume))
        except ValueError as error:
            why = f"there is no such file or folder, and {error}"
            raise ValueError(f"--resume {arguments.resume}: {why}") from None
    if arguments.halt_file is not None and os.path.lexists(arguments.halt_file):
        raise ValueError(f"--halt-file {arguments.halt_file} is there already; remove it first")
    changes = of_model(settings(arguments.set, "--set layers=2", last=True), "--set ")
    if arguments.checkpoint is not None:
        changes["checkpoint"] = arguments.checkpoint
    for name, least in (("steps", 1), ("batch", 1), ("tokens", 1)):  # before torch is loaded
        if getattr(arguments, name) is not None and getattr(arguments, name) < least:
            raise ValueError(f"{name}={getattr(arguments, name)} must be at least {least}")
    try:
        model = presets.preset(arguments.preset, **changes)
    except TypeError as error:  # --set layers=ten
        raise ValueError(str(error)) from None
    if model.attention == "nsa":
        known.check(model.backend)

    import torch

    from nsa.model.train_config import TrainConfig
    from workbook.rooms.training.job import Job

    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    given = vars(arguments) | {
        "tokens": TOKENS.get(arguments.preset, OTHER_TOKENS)
        if arguments.tokens is None
        else arguments.tokens,
        "precision": arguments.precision or ("bf16" if on_gpu else "fp32"),
        "ranks": started or arguments.ranks or 1,
        "observe": tuple(arguments.observe),
        "guard": tuple(arguments.guard),
        "model": model,
    }

    def of(owner: type) -> dict[str, Any]:
        return {f.name: given[f.name] for f in fields(owner) if given.get(f.name) is not None}

    try:
        given["train"] = TrainConfig(**of(TrainConfig))
        return Job(**of(Job))
    except TypeError as error:
        raise ValueError(str(error)) from None


def _tell(ended) -> int:
    print(f"{ended.folder.name}: {ended.status}")
    if ended.message:
        print(f"  reason   {ended.message}")
    result = ended.result
    for text in result.get("stop", {}).get("advice", ()):
        print(f"  try      {text}")
    if result:
        first, last, held_out = (
            math.nan if result[name] is None else result[name]
            for name in ("first_loss", "last_loss", "evaluation")
        )
        print(f"  loss     {first:.4f} -> {last:.4f}")
        if not math.isnan(held_out):
            print(f"  held out {held_out:.4f}")
        for name, reasons in result["attention"]["declined"].items():
            print(f"  {name} declined: {'; '.join(reasons)}")
        print(f"  speed    {result['speed']}")
        if result["weights"]:
            print(f"  weights  {result['weights']}")
        if result.get("loader"):
            print(f"  data     {result['loader']}")
    for name in ("profile.txt", "memory-rank0.txt"):
        if (page := ended.folder / name).is_file():
            print(page.read_text())
    print(f"  folder   {ended.folder}")
    print(f"  report   nsa report {ended.folder} writes one")
    if ended.failure is not None and ended.failure.how == "bad input":
        print(f"nsa: {ended.message}", file=sys.stderr)
        return BAD_INPUT
    return GOOD if ended.status == "ok" else FAILED
