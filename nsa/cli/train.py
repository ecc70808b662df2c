"""`nsa train`: a language model, alone, on several ranks of its own, or under torchrun."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.cli.options import BAD_INPUT, FAILED, GOOD, command, runs_option, words
from nsa.lab.observers.deferred import SAMPLED
from nsa.spelling import settings

if TYPE_CHECKING:
    from nsa.experiments.training.job import Job

TOKENS = {"production": 2048, "smoke": 1024, "step5": 1024}  # what the presets are made for
OTHER_TOKENS = 512


def add(commands) -> None:
    """Its parser."""
    text = (
        "Train a language model. --ranks 2 starts two processes and looks after them; "
        "torchrun --nproc-per-node 2 -m nsa train --parallel ddp works too."
    )
    made = command(commands, "train", train, text)
    option = made.add_argument
    option("--preset", default="production", metavar="NAME", help="production by default")
    option(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the model's config, as backend=triton or nsa.window=64",
    )
    option(
        "--data",
        default="text",
        metavar="DATA",
        help="text (Python's own library, the default), synthetic, copy, needle, recall, "
        "fineweb-edu, or a file or folder",
    )
    option("--steps", type=int, default=100, help="how many, those of --resume included")
    option("--batch", type=int, default=8, help="sequences a step, of all ranks together")
    option("--tokens", type=int, help="T; by default what the preset is made for")
    option("--lr", type=float, default=1e-3, help="learning rate")
    option("--min-lr", type=float, default=0.0, help="where a cosine ends")
    option("--schedule", choices=("constant", "cosine"), default="constant", help="after warm-up")
    option("--warmup", type=int, default=10, metavar="STEPS", help="steps to reach the rate")
    option("--precision", choices=("fp32", "bf16", "fp16"), help="bf16 on a GPU, fp32 without")
    option("--accumulate", type=int, default=1, metavar="N", help="micro-batches a step")
    option("--checkpoint", metavar="LAYERS", help="recompute these in the backward: all or 2:8")
    option("--compile", action="store_true", help="torch.compile of each block")
    option("--cuda-graph", action="store_true", help="the whole step as one CUDA graph")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    option("--seed", type=int, default=1337, help="of the weights and of the data")
    option("--ranks", type=int, metavar="N", help="start so many processes on this host")
    option("--port", type=int, help="where they meet; by default a free one")
    option("--parallel", choices=("none", "ddp", "fsdp"), help="ddp with --ranks, else none")
    option("--dist-backend", choices=("gloo", "nccl"), help="nccl on GPUs, gloo on CPUs")
    option("--static-graph", action="store_true", help="DDP: every step uses the same parameters")
    option("--find-unused", action="store_true", help="DDP: look for unused parameters each step")
    option("--bucket-mb", type=float, default=25.0, help="DDP: size of a bucket of gradients")
    option("--save-every", type=int, metavar="STEPS", help="checkpoints; the last two are kept")
    option("--eval-every", type=int, metavar="STEPS", help="loss on batches never trained on")
    option("--resume", metavar="PATH", help="a checkpoint, a folder of them, or a run's folder")
    option(
        "--observe",
        type=words,
        default=[],
        metavar="NAME,NAME",
        help="csv, tensorboard, arrival, buckets, modules, phases, stats; what each costs stands "
        "in its docstring",
    )
    option(
        "--observe-every",
        type=int,
        default=SAMPLED,
        metavar="STEPS",
        help="from one look of arrival and modules to the next; 1 looks at all",
    )
    # not --run: torchrun takes that for a beginning of its own --run-path, even behind -m nsa
    option("--into", metavar="DIR", help="this run's folder; by default a new one below --runs")
    runs_option(made)


def train(arguments) -> int:
    started_by_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    _check_start(arguments, started_by_torchrun)
    job = job_from(arguments, int(os.environ["WORLD_SIZE"]) if started_by_torchrun else None)

    from nsa.experiments.training import run as training_run

    places = {"runs": arguments.runs, "given": arguments.into}
    if started_by_torchrun and job.kind != "none":
        ended = training_run.under_torchrun(job, sys.argv[1:], **places)
        if os.environ["RANK"] != "0":
            return GOOD
    else:
        if arguments.port is not None:
            from nsa.lab.process.launch import check_port

            check_port(arguments.port)  # before there is a folder
        folder = training_run.make_folder(job, sys.argv[1:], **places)
        print(f"nsa: training into {folder}", file=sys.stderr, flush=True)
        if arguments.ranks is not None:
            ended = training_run.supervise(job, folder, arguments.port)
        else:
            ended = training_run.alone(job, folder)
    return _tell(ended)


def job_from(arguments, ranks: int | None = None) -> "Job":
    """What was asked for, checked. `ranks`: as many as torchrun started."""
    import torch

    from nsa.experiments.training.job import Job
    from nsa.model import presets
    from nsa.model.train_config import TrainConfig

    if arguments.resume is not None and not Path(arguments.resume).exists():
        raise ValueError(f"--resume {arguments.resume}: there is no such file or folder")
    changes = changes_from(arguments.set)
    if arguments.checkpoint is not None:
        changes["checkpoint"] = arguments.checkpoint
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    try:
        return Job(
            model=presets.preset(arguments.preset, **changes),
            train=TrainConfig(
                batch=arguments.batch,
                tokens=arguments.tokens or TOKENS.get(arguments.preset, OTHER_TOKENS),
                steps=arguments.steps,
                lr=arguments.lr,
                min_lr=arguments.min_lr,
                schedule=arguments.schedule,
                warmup_steps=arguments.warmup,
                accumulate=arguments.accumulate,
                precision=arguments.precision or ("bf16" if on_gpu else "fp32"),
                compile=arguments.compile,
                cuda_graph=arguments.cuda_graph,
                seed=arguments.seed,
            ),
            data=arguments.data,
            seed=arguments.seed,
            device=arguments.device,
            ranks=ranks or arguments.ranks or 1,
            kind=_kind(arguments),
            backend=arguments.dist_backend,
            static_graph=arguments.static_graph,
            find_unused=arguments.find_unused,
            bucket_mb=arguments.bucket_mb,
            save_every=arguments.save_every,
            eval_every=arguments.eval_every,
            resume=arguments.resume,
            observe=tuple(arguments.observe),
            observe_every=arguments.observe_every,
        )
    except TypeError as error:  # --set layers=ten
        raise ValueError(str(error)) from None


def changes_from(texts: list[str]) -> dict[str, Any]:
    """`name=value` as fields of ModelConfig, `nsa.name=value` as those below "nsa"."""
    changes: dict[str, Any] = {}
    for name, value in settings(texts, "--set layers=2", last=True).items():
        outer, dot, inner = name.partition(".")
        if dot and outer != "nsa":
            raise ValueError(f"--set {name}: only nsa has fields below it, e.g. nsa.window=64")
        below = changes.setdefault("nsa", {}) if dot else changes
        below[inner or outer] = value
    return changes


def _kind(arguments) -> str:
    """How ranks share the work: what --ranks starts is DDP unless another way is named."""
    return arguments.parallel or ("ddp" if arguments.ranks else "none")


def _check_start(arguments, started_by_torchrun: bool) -> None:
    """Who starts the ranks, and that there are some where there must be."""
    from_torchrun = int(os.environ["WORLD_SIZE"]) if started_by_torchrun else 1
    if arguments.ranks is not None and started_by_torchrun:
        raise ValueError("--ranks starts torchrun itself; under torchrun leave it out")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ValueError(f"--ranks {arguments.ranks} must be at least 1")
    kind = _kind(arguments)
    if kind == "none" and max(from_torchrun, arguments.ranks or 1) > 1:
        count = arguments.ranks or from_torchrun
        raise ValueError(
            f"{count} ranks without --parallel would each train the same model; --parallel ddp "
            "or fsdp shares the batch"
        )
    if kind != "none" and not started_by_torchrun and arguments.ranks is None:
        raise ValueError(
            f"--parallel {kind} needs ranks: nsa train --ranks 2 --parallel {kind}, or "
            f"torchrun --nproc-per-node 2 -m nsa train --parallel {kind}"
        )
    if arguments.port is not None and arguments.ranks is None:
        raise ValueError("--port is for --ranks; torchrun has --master-port")


def _tell(ended) -> int:
    print(f"{ended.folder.name}: {ended.status}")
    if ended.message:
        print(f"  reason   {ended.message}")
    if ended.result:
        result = ended.result
        print(f"  loss     {result['first_loss']:.4f} -> {result['last_loss']:.4f}")
        if result.get("evaluation") is not None:
            print(f"  held out {result['evaluation']:.4f}")
        print(f"  speed    {result['tokens_per_s']:,.0f} tokens/s")
    print(f"  folder   {ended.folder}")
    if ended.failure is not None and ended.failure.how == "bad input":
        print(f"nsa: {ended.message}", file=sys.stderr)
        return BAD_INPUT
    return GOOD if ended.status == "ok" else FAILED
