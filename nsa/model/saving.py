"""Checkpoints on disk, written atomically and checked before anything is restored."""

import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from nsa.model.names import renamed, today
from nsa.model.train_config import TrainConfig
from nsa.spelling import nearest

if TYPE_CHECKING:
    from nsa.model.train import Trainer

FORMAT = "nsa training checkpoint"
VERSION = 1
NAME = re.compile(r"step-(\d+)\.pt")
# Fields of how a step is computed, not what; a resumed run may change them. The seed is used.
FREE = {
    "model": {"name", "backend", "checkpoint", "strict"},
    "training": {"accumulate", "compile", "cuda_graph", "nonfinite", "seed"},
}


def save(trainer: "Trainer", path: str | os.PathLike) -> None:
    """Write the trainer's state; rank 0 writes, and the others wait for it."""
    fresh = not trainer.optimizer.state
    state = trainer.parallel.state(trainer.model, trainer.optimizer)
    if fresh:  # the call created a state that counts a step
        trainer.optimizer.state.clear()
        state.get("optimizer", {})["state"] = {}
    if trainer.parallel.rank == 0:
        random = {"cpu": torch.get_rng_state(), "cuda": None}
        if trainer.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(trainer.device)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "configs": _configs(trainer),
            **state,
            "scaler": trainer.scaler.state_dict(),
            "random": random,
            "steps_done": trainer.steps_done,
            "tried": trainer._tried,
            "torch": str(torch.__version__),
        }
        write(content, file_of(path, trainer.steps_done))
    trainer.parallel.barrier()


def load(trainer: "Trainer", path: str | os.PathLike) -> None:
    """Restore what `save` wrote; nothing is changed if it raises ValueError."""
    state = newest(path) if Path(path).is_dir() else read(path)
    differing = differences(_configs(trainer), state["configs"])
    if differing:
        raise ValueError(
            f"{path} is of another config (here, there): {'; '.join(differing)}; a trainer built "
            "with the checkpoint's values can load it"
        )
    groups = trainer.optimizer.param_groups
    own = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    # The settings are the config's, and a rate that is a tensor stays the one the graph reads.
    for group, saved, mine in zip(groups, state["optimizer"]["param_groups"], own, strict=True):
        saved.update(mine | {"lr": 0.0})
        group["lr"] = 0.0
    trainer.parallel.load_state(trainer.model, trainer.optimizer, state)
    if not state["optimizer"]["state"]:
        trainer.optimizer.state.clear()
    for group, mine in zip(trainer.optimizer.param_groups, own, strict=True):
        group.update(mine)
    if trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(state["scaler"])
    trainer.steps_done, trainer._tried = state["steps_done"], state["tried"]
    torch.set_rng_state(state["random"]["cpu"])
    if trainer.device.type == "cuda" and state["random"]["cuda"] is not None:
        torch.cuda.set_rng_state(state["random"]["cuda"], trainer.device)


def write(state: dict[str, Any], path: Path) -> None:
    """Write the file atomically, by a temporary name; an interruption keeps the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except RuntimeError as error:
        # torch's own clean-up hides what happened
        if isinstance(error.__context__, KeyboardInterrupt | OSError):
            raise error.__context__ from None
        raise
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too
    finally:
        os.close(folder)


def read(path: str | os.PathLike, kind: str = FORMAT) -> dict[str, Any]:
    """Read a state of that kind from a file, on the CPU, without executing anything in it. Raises
    ValueError for a file that is truncated or of another kind, and OSError if there is none."""
    with open(path, "rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                damaged = archive.testzip()  # torch itself does not verify checksums
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} is wrong")
            stream.seek(0)
            state = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # torch may raise anything for a foreign file
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if isinstance(error, pickle.UnpicklingError):
                reason = "it holds more than tensors and plain values"
            raise ValueError(
                f"{path} is truncated or no checkpoint at all ({reason}); an earlier one would do"
            ) from error
    if not isinstance(state, dict) or state.get("format") != kind:
        writer = "Trainer.save" if kind == FORMAT else "save"
        raise ValueError(f"{path} holds no {kind}; {writer} writes one")
    if state.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {state.get('version')}, this library reads version {VERSION}"
        )
    return with_names_of_today(state)


def with_names_of_today(state: dict[str, Any]) -> dict[str, Any]:
    """Rename the parameters and their optimizer state to the names of this version."""
    changed = {"model": renamed(state["model"])} if "model" in state else {}
    optimizer = state.get("optimizer")
    if optimizer:
        groups = [
            g | {"params": [today(n) for n in g["params"]]} for g in optimizer["param_groups"]
        ]
        changed["optimizer"] = {"state": renamed(optimizer["state"]), "param_groups": groups}
    return state | changed


def load_model(
    path: str | os.PathLike, device: str | torch.device = "cpu", **changes: Any
) -> LanguageModel:
    """Load a model that `nsa train` saved, in evaluation mode: from a file, or the newest of a
    run's folder or a folder of checkpoints. `changes` are options such as backend="triton".

    Raises ValueError for an invalid checkpoint or change, FileNotFoundError if there is none.
    """
    for name in changes:
        if name not in FREE["model"]:
            hint = nearest(name, sorted(FREE["model"]))
            raise ValueError(f"{name} stays as the weights were trained with; {hint}")
    state = newest(path) if Path(path).is_dir() else read(path)
    return model_of(state, **changes).to(device).eval()


def model_of(state: dict[str, Any], **changes: Any) -> LanguageModel:
    """Model from a checkpoint's state, on the CPU; `changes` are fields of its ModelConfig."""
    with torch.device("meta"):  # nothing is drawn that would be replaced
        model = LanguageModel(ModelConfig.from_dict(state["configs"]["model"]).with_(**changes))
    model.load_state_dict(state["model"], assign=True)
    return model


def newest(folder: str | os.PathLike) -> dict[str, Any]:
    """Read the newest readable state in the folder or, for a run, in its checkpoints/, with a
    warning for unreadable ones. Raises FileNotFoundError for a folder without checkpoints,
    ValueError if none can be read."""
    below = Path(folder) / "checkpoints"
    folder = below if below.is_dir() else folder
    files = checkpoints(folder)
    if not files:
        raise FileNotFoundError(f"there is no checkpoint (step-000500.pt) in {folder}")
    passed_over = []
    for file in reversed(files):
        try:
            state = read(file)
        except ValueError as error:
            passed_over.append(str(error))
        else:
            for message in passed_over:
                warnings.warn(f"passed over: {message}", RuntimeWarning, stacklevel=4)
            return state
    raise ValueError(f"no checkpoint in {folder} can be read: {'; '.join(passed_over)}")


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """Checkpoints of the folder in the order of their steps."""
    named = ((NAME.fullmatch(file.name), file) for file in Path(folder).iterdir())
    return [file for _, file in sorted((int(m[1]), file) for m, file in named if m)]


def file_of(path: str | os.PathLike, steps_done: int) -> Path:
    """Return `path` if it is a .pt file, else the file of that step in the folder `path`."""
    path = Path(path)
    return path if path.suffix == ".pt" else path / f"step-{steps_done:06d}.pt"


def differences(here: dict[str, dict], there: dict[str, dict]) -> list[str]:
    """Differences of two runs' configs, e.g. "model dim: 64, 32", except in `FREE` fields.

    A run stored before a field existed has the field's default."""
    found = []
    for part, free in FREE.items():
        config = {"model": ModelConfig, "training": TrainConfig}[part]
        mine, other = _flat(here[part]), _flat(config.from_dict(there[part]).to_dict())
        for name in mine | other:
            if name not in free and mine.get(name) != other.get(name):
                found.append(f"{part} {name}: {mine.get(name)!r}, {other.get(name)!r}")
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


def _configs(trainer: "Trainer") -> dict[str, dict]:
    training = trainer.config.to_dict()
    if training["schedule"] == "constant":
        training["steps"] = None  # a run of constant rate has no end to compare
    return {"model": trainer.model.config.to_dict(), "training": training}
