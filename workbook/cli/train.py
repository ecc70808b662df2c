"""`nsa train`: train a language model in one process, on several ranks, or under torchrun.

The options that are fields of Job or TrainConfig are declared in workbook.lab.options.
"""

import math
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nsa.spelling import settings
from workbook.cli.options import (
    BAD_INPUT,
    FAILED,
    GOOD,
    SEVERAL,
    command,
    of_fields,
    of_model,
    place_of,
    share,
)
from workbook.lab.options import Options, Steps

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
    of_fields(made, Steps)
    text = "recompute these in the backward: all or 2:8"
    option("--checkpoint", metavar="LAYERS", help=text)
    of_fields(made, Options, ranks={"default": None}, kind={"default": None})
    option("--port", type=int, help="where ranks meet; by default a free one")
    text = (
        "what a foreign process on the GPU, too little memory or a stale installation does: refuse "
        "(default), warn or off"
    )
    option("--preflight", choices=("refuse", "warn", "off"), default="refuse", help=text)
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
        from workbook.rooms.training.ranks import check_port

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

    if arguments.resume is not None:
        arguments.resume = str(place_of("--resume", arguments.resume, arguments.runs))
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
