"""One cell: trained until it is done or time is up, resumed where it stopped, then evaluated."""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa.attention import witness
from nsa.model import saving
from nsa.model import tokens as tokenized
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel, parameter_count
from nsa.model.parallel import SINGLE
from nsa.model.positions import ByPosition, by_position
from nsa.model.shards import Shards, opened
from nsa.model.train import WARMUP, Trainer
from workbook.lab import todays
from workbook.lab.measure.coverage import coverage
from workbook.lab.measure.selections import selections
from workbook.lab.training import trainer_at
from workbook.rooms.quality.cells import BLOCKS, BYTES, Cell
from workbook.rooms.quality.planted import KINDS, Planted
from workbook.runs.files import read_json, write_json

LOOKS = 8  # evaluations along a training, each with a checkpoint
CHUNK = 16  # steps between looks at the clock
TIMES = (1, 2, 4)  # of the trained length, at which tasks are asked
SELECTED_AT = (8192, 32768, 65536)  # lengths whose selections are described, and T itself
HELD_OUT_SEED = 1337  # of evaluation: every variant and seed reads the same passages
SEEN = ("gates", "entropy", "union_mean", "forced", "first_anyway", "local_anyway")
LEFT_OUT = WARMUP + 2  # first steps of a process, which compile and capture
AT_ONCE = 65536  # tokens that an evaluation reads at once, or a step's if they are more


@dataclass(frozen=True)
class Amounts:
    """Amounts of an evaluation, in ids of held-out text and rows of a task."""

    look: int = 1 << 19  # along the training
    held_out: int = 1 << 21  # at its end, at each length
    rows: int = 32  # of each task and length
    longest: int = 4  # times the trained length
    tensors: tuple[int, ...] = ()  # lengths at which each layer's tensors are kept


AMOUNTS = {"tiny": Amounts(1 << 11, 1 << 13, 2)}  # by model, where they are others


@dataclass
class _Kept:
    """Numbers of a cell's training so far, beside its checkpoint."""

    losses: list[float]  # nats, of every step
    curve: list[list[float]]  # [bytes, seconds of training, bits a byte on held-out text]
    selected: list[dict[str, Any]]  # at the same looks: "bytes", and SEEN of each layer
    seconds: float = 0.0  # of training, compiling steps left out
    timed: int = 0  # steps in them


class OutOfTime(Exception):
    """Time is up; what the cell has done is saved. row: the cell's, "unfinished"."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row["message"])
        self.row = row


def train_cell(spec: dict[str, Any]) -> dict[str, Any]:
    """Entry of a child process: {"cell", "text" its folder, "device", "threads", "longest"} -> row.
    Nothing of the training is kept."""
    if spec.get("threads"):
        torch.set_num_threads(spec["threads"])
    cell = Cell.from_dict(spec["cell"])
    amounts = amounts_of(cell, spec["longest"])
    with tempfile.TemporaryDirectory() as folder:
        gpu = spec["device"] == "cuda"
        given = {"device": spec["device"], "compile": gpu, "cuda_graph": gpu, "amounts": amounts}
        return run_cell(cell, opened(spec["text"]), Path(folder), **given)


def amounts_of(cell: Cell, longest: int, tensors: Sequence[int] = ()) -> Amounts:
    """Amounts to evaluate a cell with, up to `longest` times its length; tensors as of Amounts."""
    amounts = AMOUNTS.get(cell.model, Amounts())
    return replace(amounts, longest=longest, tensors=tuple(tensors))


def run_cell(
    cell: Cell,
    shards: Shards,
    folder: Path,
    *,
    device: str,
    compile: bool = False,
    cuda_graph: bool = False,
    until: float = math.inf,
    amounts: Amounts = Amounts(),
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train and evaluate the cell; return its row, also in row.json of the cell's folder.

    Resumes from the folder, bit for bit on a CPU. At `until`, on the `clock`, it saves and raises
    OutOfTime; `evaluation` of the training's end is not interrupted. A loss that is not finite, or
    worse at the end than guessing each id, makes the outcome "diverged"; the row stays.
    """
    folder = folder / cell.name
    asked = amounts.tensors if _selects(cell.config()) else ()
    saved = all((folder / f"tensors-{tokens}").is_dir() for tokens in asked)
    row = read_json(folder / "row.json", {})
    if todays(row.get("cell", {})) == cell.to_dict() and saved:
        return row | {"cell": cell.to_dict()}
    if compile:
        torch.compiler.reset()  # each cell's blocks are others; the compiler's files are kept
    train = Planted(_text(cell, shards, "train", cell.seed), cell.seed)
    held_out = _text(cell, shards, "held-out", HELD_OUT_SEED)
    config = cell.training(compile=compile, cuda_graph=cuda_graph)
    place, model = replace(SINGLE, device=device), cell.config()
    with (
        witness.recording() as seen,
        trainer_at(place, model, config, train, prefetch=True) as trainer,
    ):
        measure = partial(_measure, trainer.model, cell, precision=cell.precision)
        kept = _resumed(trainer, folder, say)
        first, looks = trainer.steps_done, _looks(cell.steps)
        while trainer.steps_done < cell.steps:
            now = trainer.steps_done
            ends = [now + CHUNK, cell.steps, *[x for x in looks if x > now][:1]]
            ends += [first + LEFT_OUT] if now < first + LEFT_OUT else []
            began = clock()
            kept.losses += trainer.run(min(ends) - now)
            if now >= first + LEFT_OUT:
                kept.seconds += clock() - began
                kept.timed += trainer.steps_done - now
            if not _finite(kept):
                break
            if trainer.steps_done in looks:
                bits = measure(held_out, cell.tokens, amounts.look).bits
                seconds = kept.seconds / max(1, kept.timed) * trainer.steps_done
                read = round(trainer.steps_done * cell.batch_tokens * _bytes(held_out))
                kept.curve.append([read, seconds, bits])
                if _selects(trainer.model.config):
                    ids = held_out.batch(0, 1, cell.tokens, trainer.device)[0]
                    layers = selections(_eager(trainer.model), ids, cell.precision)
                    layers = [{name: layer[name] for name in SEEN} for layer in layers]
                    kept.selected.append({"bytes": kept.curve[-1][0], "layers": layers})
                _save(trainer, kept, folder)
                say(f"step {trainer.steps_done} of {cell.steps}: {bits:.4f} bits, {seconds:.0f} s")
            if clock() > until:
                break
        row = _facts(cell, trainer, kept, seen.record(), shards, _bytes(held_out))
        if trainer.steps_done < cell.steps and _finite(kept):
            _save(trainer, kept, folder)
            message = f"saved after step {trainer.steps_done} of {cell.steps}"
            raise OutOfTime(row | {"outcome": "unfinished", "message": message})
        if row["outcome"] == "ok":
            row |= _evaluated(cell, trainer.model, held_out, amounts, folder, say)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "row.json", row)
    return row


def _text(cell: Cell, shards: Shards, split: str, seed: int) -> Any:
    """The split as the cell reads it. ValueError for shards that are tokenized otherwise."""
    if cell.vocab == BYTES:
        return shards.text(split, seed)
    found = tokenized.tokens(shards, split, seed)
    found.check(cell.vocab)
    return found


def _bytes(text: Any) -> float:
    """Bytes of an id on average; 1 in bytes, in which planted facts are spelled."""
    return getattr(text, "bytes_per_token", 1.0)


def _selects(config: ModelConfig) -> bool:
    return config.attention == "nsa" and config.force_branch in (None, "slc")


def _finite(kept: _Kept) -> bool:
    return all(map(math.isfinite, kept.losses[-CHUNK:]))


def _looks(steps: int) -> list[int]:
    return sorted({max(1, round(steps * part / LOOKS)) for part in range(1, LOOKS + 1)})


def _resumed(trainer: Trainer, folder: Path, say: Callable[[str], None]) -> _Kept:
    """Load the newest checkpoint that has its numbers beside it; else start anew."""
    for file in reversed(saving.checkpoints(folder)) if folder.is_dir() else ():
        numbers = read_json(file.with_suffix(".json"), {})
        if numbers:
            trainer.load(file)
            say(f"resumed after step {trainer.steps_done}")
            return _Kept(**numbers)
    return _Kept([], [], [])


def _save(trainer: Trainer, kept: _Kept, folder: Path) -> None:
    before = saving.checkpoints(folder) if folder.is_dir() else []
    trainer.save(folder)
    file = saving.file_of(folder, trainer.steps_done)
    write_json(file.with_suffix(".json"), vars(kept))
    for old in before:  # after the new one is whole
        if old != file:
            old.unlink()
            old.with_suffix(".json").unlink(missing_ok=True)


def _eager(model: LanguageModel) -> LanguageModel:
    """The same weights in a model that is not compiled, and takes any length."""
    with torch.device("meta"):
        other = LanguageModel(model.config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def _measure(
    model: LanguageModel, cell: Cell, data: Any, tokens: int, amount: int, precision: str
) -> ByPosition:
    """Evaluate about `amount` ids in rows of `tokens`; losses are those of a byte."""
    rows = max(1, amount // tokens)
    batch = max(1, min(rows, max(AT_ONCE, cell.batch_tokens) // tokens))
    given = {"batch": batch, "tokens": tokens, "batches": max(1, rows // batch)}
    found = by_position(_eager(model), data, **given, precision=precision)
    return replace(found, nats=found.nats / _bytes(data))


def _facts(
    cell: Cell, trainer: Trainer, kept: _Kept, seen: dict[str, Any], shards: Shards, size: float
) -> dict[str, Any]:
    steps, device = trainer.steps_done, trainer.device
    last = kept.losses[-max(1, cell.steps // 10) :]
    good = _finite(kept) and sum(last) / len(last) < math.log(trainer.model.config.vocab)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    each = kept.seconds / kept.timed if kept.timed else None
    return {
        "cell": cell.to_dict(),
        "outcome": "ok" if good else "diverged",
        "steps": steps,
        "parameters": parameter_count(trainer.model),
        "train_s": each and each * steps,
        "tokens_s": each and cell.batch_tokens / each,
        **({} if size == 1 else {"bytes_per_token": size}),
        "losses": _thinned(kept.losses),
        "curve": kept.curve,
        "selected": kept.selected,
        "paths": seen["paths"],
        "device": name,
        "torch": torch.__version__,
        "compiled": trainer.config.compile,
        "cuda_graph": trainer.config.cuda_graph,
        "data": shards.record(),
    }


def _thinned(losses: list[float], most: int = 256) -> list[float]:
    """Means of equal parts of the losses, at most `most` of them."""
    size = math.ceil(len(losses) / most)
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [round(sum(part) / len(part), 5) for part in parts]


def _evaluated(
    cell: Cell,
    model: LanguageModel,
    held_out: Any,
    amounts: Amounts,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Bits a byte, by position at 1, 2 and 4 times the length; tasks; selections."""
    began, positions, tasks = time.perf_counter(), {}, {}
    measure = partial(_measure, model, cell, precision=cell.precision)
    lengths = [times * cell.tokens for times in TIMES if times <= amounts.longest]
    for tokens in lengths:
        positions[tokens] = measure(held_out, tokens, amounts.held_out)
        for kind in KINDS:
            asked = Planted(held_out, HELD_OUT_SEED, kind)
            found = measure(asked, tokens, amounts.rows * tokens)
            tasks.setdefault(kind, {})[str(tokens)] = [found.accuracy, found.bits]
    looked = _looked_at(cell, _eager(model), held_out, amounts, folder)
    say(f"evaluated in {time.perf_counter() - began:.0f} s")
    return {
        "bits": positions[cell.tokens].bits,
        "by_position": {str(n): found.buckets() for n, found in positions.items()},
        "tasks": tasks,
        **looked,
        "evaluation_s": time.perf_counter() - began,
    }


def _looked_at(
    cell: Cell, model: LanguageModel, held_out: Any, amounts: Amounts, folder: Path
) -> dict[str, Any]:
    """Describe what NSA layers select, and what NSA's blocks would hold of dense ones."""

    def read(tokens: int) -> torch.Tensor:
        return held_out.batch(0, 1, tokens, next(model.parameters()).device)[0]

    selected = {}
    if _selects(model.config):
        wanted = [n for n in (cell.tokens, *SELECTED_AT) if n <= amounts.longest * cell.tokens]
        for tokens in sorted({*wanted, *amounts.tensors}):
            asked, part = tokens in amounts.tensors, folder / f"tensors-{tokens}.part"
            keep = partial(_keep, part) if asked else None
            selected[str(tokens)] = selections(model, read(tokens), cell.precision, keep)
            if asked:  # whole, now that every layer is there
                shutil.rmtree(part.with_suffix(""), ignore_errors=True)
                part.rename(part.with_suffix(""))
    found: dict[str, Any] = {"selections": selected}
    if model.config.attention == "dense":
        configs = {variant: replace(cell, variant=variant).config().nsa for variant in BLOCKS}
        found["coverage"] = coverage(model, read(cell.tokens), configs, cell.precision)
    return found


def _keep(folder: Path, layer: int, tensors: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / f"layer-{layer}.pt")
