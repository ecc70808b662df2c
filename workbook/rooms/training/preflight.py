"""Checks before the first step of `nsa train`: a machine or a request that would spoil the run is
refused with its reason; questionable settings give warnings."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nsa
from nsa.model.config import layer_range
from nsa.model.parallel import devices
from nsa.model.train_config import TrainConfig
from whyhung.process import preflight, sources
from workbook.lab.measure.activation_model import activations, predict
from workbook.lab.observers.deferred import SAMPLED
from workbook.lab.observers.guards import KEPT
from workbook.rooms.training.job import Job

REFUSE, WARN, OFF = HOW = ("refuse", "warn", "off")
AUTO = ("triton", "packed", "gather")  # what `auto` may select, by the memory that they hold
UNSAVED = 1000  # steps above which missing checkpoints give a warning
GIB = 2**30
PACKAGES = "nsa", "whyhung", "workbook"
GATES = {"gate", "gate_temperature", "gate_init", "stopgrad_gates"}
# Settings without effect on a model, by the names of --set.
UNUSED_BY = {
    "attention=dense": GATES | {"nsa", "phi", "compress_rope", "shared_kv", "sinks"},
    "force_branch=cmp": GATES | {"nsa.window"},
    "force_branch=slc": GATES | {"nsa.window"},
    "force_branch=win": GATES | {"phi", "compress_rope"},
}


@dataclass(frozen=True)
class Finding:
    """One finding. state: "ok", "warning", "refused" or "unknown" (not determinable)."""

    about: str  # gpu, memory, installation, options, disk
    state: str
    text: str


def check(
    job: Job, how: str = REFUSE, changed: Iterable[str] = (), runs: str = "runs"
) -> dict[str, Any]:
    """Run the checks; return findings for preflight.json. Warnings go to stderr. `changed` are the
    model's fields named by --set, `runs` the parent of the run's folder. Raises ValueError with all
    reasons if one is refused and `how` is "refuse"."""
    if how not in HOW:
        raise ValueError(f"preflight={how!r} must be one of {', '.join(HOW)}")
    if how == OFF:
        return {"how": how, "findings": []}
    found = list(look(job, changed, runs))
    refused = [finding.text for finding in found if finding.state == "refused"]
    if refused and how == REFUSE:
        raise ValueError(f"preflight: {'; '.join(refused)} (--preflight warn trains all the same)")
    for finding in found:
        if finding.state in ("refused", "warning"):
            print(f"nsa: preflight: {finding.text}", file=sys.stderr, flush=True)
    return {"how": how, "findings": [asdict(finding) for finding in found]}


def look(job: Job, changed: Iterable[str] = (), runs: str = "runs") -> Iterator[Finding]:
    """Yield at least one finding each about gpu, memory, installation, options and disk."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", job.ranks))
    on_gpu = devices(local, None, job.device)[0]
    only = preflight.first(local) if on_gpu else None
    yield from _gpu(on_gpu, only)
    yield _memory(job, local, on_gpu, only)
    yield installation(Path.cwd())
    yield from _options(job, set(changed))
    yield _disk(job, Path(runs))


def _gpu(on_gpu: bool, only: str | None) -> Iterator[Finding]:
    if not on_gpu or only is None:
        text = "the GPU's processes cannot be listed" if on_gpu else "no GPU is used"
        yield Finding("gpu", "unknown" if on_gpu else "ok", text)
        return
    torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    others = preflight.foreign(only, besides=torchrun)
    for text in others:
        yield Finding("gpu", "refused", text)
    if not others:
        yield Finding("gpu", "ok", "no other process is seen on the GPU")


def needed(job: Job, ranks: int) -> tuple[int, int | None, str]:
    """Estimate bytes per rank: (weights, gradients and moments, exactly; with activations, a lower
    bound of the peak, None if no formula is known; its uncertainty as text)."""
    model, train = job.model, job.train
    state = predict(model)
    shards = ranks if job.kind == "fsdp" else 1
    buckets = state.gradients if job.kind == "ddp" and not job.gradient_as_bucket_view else 0
    exact = (state.fixed + buckets) // shards
    if model.attention != "nsa":
        return exact, None, f"activations of attention={model.attention!r} are not predicted"
    rows = train.batch // (ranks // job.cp * train.accumulate)
    tokens = -(-train.tokens // job.cp)  # of a sequence on one rank
    backends = AUTO if model.backend == "auto" else (model.backend,)
    dtype = "fp32" if train.precision == "fp32" else "bf16"
    each = [activations(model, tokens, rows, dtype, backend) for backend in backends]
    kept = max(each, key=lambda found: found.total)
    # A recomputed block keeps its input; one at a time keeps all of its activations.
    recomputed = max(0, len(layer_range(model.checkpoint, model.layers)) - 1)
    of_a_layer = (kept.total - kept.casts - kept.head) // model.layers
    saved = recomputed * (of_a_layer - rows * tokens * model.dim * 4)
    # Gradients stay while the next micro-batch runs, and DDP's buckets all the time.
    early = state.gradients if train.accumulate > 1 or job.kind == "ddp" else 0
    early += buckets
    peak = (state.weights + state.optimizer_state + early) // shards + kept.total - saved
    doubt = (
        "activations from shapes, to 15 %; temporaries are not counted, and measured steps took "
        "1.1 to 2 times that, with all layers recomputed up to 4 times"
    )
    return exact, max(exact, peak), doubt


def _memory(job: Job, local: int, on_gpu: bool, only: str | None) -> Finding:
    exact, peak, doubt = needed(job, job.ranks)
    free = _free_on_gpu(only) if on_gpu else preflight.free_ram()
    where, times = ("the GPU", 1) if on_gpu else ("this machine", local)
    exact, peak = exact * times, None if peak is None else peak * times
    parts = f"weights, gradients and moments take {_size(exact)}"
    with_all = f"{parts}, with activations at least {_size(peak)}" if peak is not None else parts
    if free is None:
        return Finding("memory", "unknown", f"{with_all}; what {where} has free is not known")
    has = f"{where} has {_size(free)} free"
    if exact > free:
        return Finding("memory", "refused", f"{parts} and {has}")
    if peak is not None and peak > free:
        less = "a smaller --batch, --accumulate or --checkpoint all would need less"
        return Finding("memory", "warning", f"{with_all} ({doubt}) and {has}; {less}")
    return Finding("memory", "ok", f"{with_all} ({doubt}) and {has}")


def _size(count: int) -> str:
    return f"{count / GIB:.3g} GiB" if count >= GIB else f"{count / 2**20:.3g} MiB"


def _free_on_gpu(only: str | None) -> int | None:
    """Free bytes on the GPU with the least, by nvidia-smi: a CUDA context of our own would hold
    memory as long as this process lives."""
    found = [] if only is None else preflight.numbers("memory.free", only)
    return min(found) * 2**20 if found else None


def installation(here: Path, package: Path = Path(nsa.__file__).parent) -> Finding:
    """Check that the imported nsa is that of the source tree of the current folder."""
    trees = (folder for folder in (here, *here.parents) if _is_source(folder))
    tree = next(trees, None)
    if tree is None or (tree / "nsa").resolve() == package.resolve():
        return Finding("installation", "ok", "the nsa that runs is the only one here")
    there, imported = (_hashes(folder) for folder in (tree, package.parent))
    differ = sorted(f for f in there.keys() | imported.keys() if there.get(f) != imported.get(f))
    if not differ:
        return Finding("installation", "ok", f"the nsa in {package.parent} equals the tree here")
    return Finding(
        "installation",
        "refused",
        f"nsa is imported from {package.parent}, and the tree in {tree} differs in {len(differ)} "
        f"files, {differ[0]} the first; pip install -e {tree} makes them one",
    )


def _is_source(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    if not (folder / "nsa" / "__init__.py").is_file() or not project.is_file():
        return False
    return 'name = "nsa"' in project.read_text(encoding="utf-8", errors="replace")


def _hashes(top: Path) -> dict[str, str]:
    files = [file for name in PACKAGES for file in (top / name).rglob("*.py")]
    return {file.relative_to(top).as_posix(): sources.hash_of(str(file)) for file in files}


def _options(job: Job, changed: set[str]) -> Iterator[Finding]:
    """Find options without effect, and a missing one that may be regretted later."""
    train, found = job.train, []
    if train.min_lr and train.schedule == "constant":
        found.append("--min-lr is never used: the schedule is constant")
    if train.warmup_steps > max(train.steps, TrainConfig.warmup_steps):
        found.append(f"--warmup {train.warmup_steps}: --lr is never reached in {train.steps} steps")
    if job.observe_every != SAMPLED and not {"arrival", "modules"} & set(job.observe):
        found.append("--observe-every is never used: only --observe arrival and modules read it")
    if job.bucket_mb != Job.bucket_mb and job.kind != "ddp":
        found.append(f"--bucket-mb is never used: parallel={job.kind!r} has no buckets")
    if job.backend is not None and job.kind == "none":
        found.append("--dist-backend is never used: there is one rank")
    switched = {f"attention={job.model.attention}", f"force_branch={job.model.force_branch}"}
    for switch in sorted(switched & UNUSED_BY.keys()):
        unused = UNUSED_BY[switch]
        found += [
            f"--set {name} is never used: {switch}"
            for name in sorted(changed)
            if name in unused or name.partition(".")[0] in unused
        ]
    if train.steps > UNSAVED and job.save_every is None:
        found.append(f"without --save-every nothing is left of {train.steps} steps cut short")
    for text in found:
        yield Finding("options", "warning", text)
    if not found:
        yield Finding("options", "ok", "every option is used")


def _disk(job: Job, runs: Path) -> Finding:
    """Check disk space for the kept checkpoints and the next, written before one is deleted."""
    count = KEPT + 1 if job.save_every else int(job.weights)
    if not count:
        return Finding("disk", "ok", "no checkpoint is written")
    state = predict(job.model)
    size = count * (state.weights + state.optimizer_state)
    place = next(p for p in (runs.absolute(), *runs.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    what = f"{count} checkpoint{'s take' if count > 1 else ' takes'}"
    text = f"{what} {_size(size)} and {runs} has {_size(free)}"
    if size <= free:
        return Finding("disk", "ok", text)
    if job.save_every:
        return Finding("disk", "refused", text)
    return Finding("disk", "warning", f"{text}: the last weights will not be kept")
