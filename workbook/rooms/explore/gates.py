"""Gates by branch of a model, with initial or trained weights."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from nsa.model import data, saving
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel
from nsa.model.presets import preset

TOKENS = 256  # of text that the model reads
SEED = 1337


@dataclass(frozen=True)
class Gates:
    """Mean gates [L, HQ, 3] of each layer and head over TOKENS bytes of text, from 0 to 1."""

    name: str
    means: Tensor

    @property
    def shares(self) -> Tensor:
        """Gates [L, HQ, 3] normalized to sum to 1."""
        return self.means / self.means.sum(-1, keepdim=True)


@lru_cache(8)
def gates_of(model: str) -> Gates:
    """Compute gates of a preset's initial first layer, or of all layers of a checkpoint that
    `nsa train` wrote: a file, or a folder (its newest is used). ValueError for anything else."""
    path = Path(model)
    if path.suffix == ".pt" or path.is_dir():
        try:
            state = saving.newest(path) if path.is_dir() else saving.read(path)
        except OSError as error:
            raise ValueError(f"no weights in {model}: {error}") from None
        made = saving.model_of(state)
        name = f"{path.name}, after {state['steps_done']} steps"
    else:
        # deeper layers start alike, and the largest preset takes a second for a text
        made = LanguageModel(preset(model, layers=1))
        made.reset_parameters(SEED)
        name = f"{model}'s first layer before training"
    return Gates(name, _means(made))


@torch.no_grad()
def _means(model: LanguageModel) -> Tensor:
    found = []

    def keep(layer, inputs):
        found.append(layer.arguments(inputs[0])["gates"][0].float().mean(0))

    layers = [m for m in model.modules() if isinstance(m, NSAAttention)]
    if not layers:
        raise ValueError("dense attention has no gates; name a model with attention='nsa'")
    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        model(data.text(seed=SEED).batch(0, 1, TOKENS)[0])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)
