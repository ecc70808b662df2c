"""`nsa estimate`: memory of a training, before it runs and without a GPU."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from nsa.spelling import nearest, settings
from workbook.cli.options import GOOD, command, of_model
from workbook.cli.train import OTHER_TOKENS, TOKENS
from workbook.lab.training import TrainingSpec

EXAMPLE = "tokens=2048"


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, estimate, "--runs", "--json")
    names = ", ".join(name for name in TrainingSpec.__dataclass_fields__ if name != "changes")
    text = f"{names}, or a field of the model's config, as nsa.window=64"
    made.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=text)
    text = "of device=cuda: its name or a part of it; default: %(default)s"
    made.add_argument("--gpu", default="NVIDIA H200", metavar="NAME", help=text)
    text = "as PYTORCH_CUDA_ALLOC_CONF has it, e.g. expandable_segments:True"
    made.add_argument("--allocator", default="", metavar="SETTINGS", help=text)
    text = "also the largest T and the largest batch that fit"
    made.add_argument("--fits", type=float, metavar="GIB", help=text)
    text = "the training of a run of nsa train; KEY=VALUE changes it"
    made.add_argument("--like", metavar="RUN", help=text)
    text = "read what this machine's GPU takes beyond tensors, print the row to add, and end"
    made.add_argument("--calibrate", action="store_true", help=text)


def estimate(arguments) -> int:
    """Estimate the peak memory of a training step, by phase, category and module, without running
    it: nsa estimate preset=production tokens=2048 batch=16 backend=triton precision=bf16. The
    default is a GPU (device=cuda), which need not be present."""
    if arguments.calibrate:
        from workbook.lab.estimate import calibrate

        gpu = calibrate.calibrated()
        print(json.dumps(asdict(gpu), indent=1) if arguments.json else calibrate.row(gpu))
        return GOOD
    if arguments.fits is not None and not arguments.fits > 0:
        raise ValueError(f"--fits {arguments.fits:g} must be greater than 0 GiB")
    from workbook.lab.estimate.gpus import gpu_named

    gpu_named(arguments.gpu)  # like the settings, before torch is loaded
    given = settings(arguments.settings, EXAMPLE)
    spec = spec_of((_like(arguments.like, arguments.runs) if arguments.like else {}) | given)

    from workbook.lab.estimate import estimate as estimates
    from workbook.lab.estimate import told

    how = {"gpu": arguments.gpu, "allocator": arguments.allocator}
    try:
        found, fits = estimates.estimate(spec, **how), None
        if arguments.fits is not None:
            names = ("tokens", "batch")
            fits = {n: estimates.largest(spec, n, arguments.fits, **how) for n in names}
            fits |= {"gib": arguments.fits}
    except RuntimeError as error:  # its step needs values, which a trace does not have
        raise ValueError(f"this training cannot be estimated: {error}") from error
    if arguments.json:
        plain = {n: asdict(b) if n != "gib" else b for n, b in (fits or {}).items()}
        content = {"spec": spec.to_dict(), "estimate": asdict(found), "fits": plain or None}
        print(json.dumps(content, indent=1))
    else:
        print(told.page(spec, found, fits))
    return GOOD


def spec_of(given: dict[str, Any]) -> TrainingSpec:
    """TrainingSpec from the settings of the command line. A name that is no field of TrainingSpec
    is a field of the model's config. ValueError for settings that could not be run."""
    from nsa.config import NSAConfig
    from nsa.model.config import ModelConfig

    preset = given.get("preset", "production")
    usual = {"preset": preset, "tokens": TOKENS.get(preset, OTHER_TOKENS), "device": "cuda"}
    usual |= {"precision": "bf16" if given.get("device", "cuda") == "cuda" else "fp32"}
    own = {field.name for field in fields(TrainingSpec)}
    known = own | {field.name for field in fields(ModelConfig)}
    known |= {f"nsa.{field.name}" for field in fields(NSAConfig)}
    for name in given:
        if name not in known:
            hint = nearest(name, sorted(known))
            hint = hint if "nearest" in hint else "nsa estimate --help lists them"
            raise ValueError(f"a training has no {name!r}; {hint}")
    changes = of_model({name: value for name, value in given.items() if name not in own})
    whole = usual | {name: value for name, value in given.items() if name in own}
    whole["changes"] = whole.get("changes", {}) | changes
    return TrainingSpec(**whole)


def _like(run: str, runs: str) -> dict[str, Any]:
    """Fields of a TrainingSpec, from a run of `nsa train`. ValueError for a run of another kind, or
    for a setting that TrainingSpec cannot express."""
    from nsa.model.presets import PRESETS, preset
    from workbook.runs.files import read_json
    from workbook.runs.store import Store

    folder = Path(Store(runs).find(run))
    job = read_json(folder / "job.json")
    if job is None:
        raise ValueError(f"--like {run}: {folder.name} is no run of nsa train, it has no job.json")
    model, train = job["model"], job["train"]
    if model["name"] not in PRESETS:
        raise ValueError(f"--like {run}: its model {model['name']!r} is none of the presets")
    if train.get("accumulate", 1) > 1 or train["precision"] == "fp16":
        raise ValueError(
            f"--like {run}: it has accumulate={train['accumulate']} and "
            f"precision={train['precision']}; accumulate=1 with fp32 or bf16 can be estimated"
        )
    base = preset(model["name"]).to_dict()
    changed = {name: value for name, value in model.items() if value != base.get(name)}
    found = {n: changed.pop(n) for n in ("layers", "backend", "checkpoint") if n in changed}
    found |= {n: train[n] for n in ("batch", "tokens", "precision", "compile", "cuda_graph")}
    found |= {"preset": model["name"], "ranks": job["ranks"], "parallel": job["kind"]}
    found |= {"cp": job["cp"]} if job.get("cp", 1) > 1 else {}
    device = {"device": job["device"]} if job["device"] != "auto" else {}
    return found | device | {"changes": changed}
