"""How much of each branch a model takes: of first weights, or of weights that were trained."""

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


@dataclass(frozen=True)
class Gates:
    """Means over TOKENS bytes of text: gates [L, HQ, 3] of each layer and head, from 0 to 1."""

    name: str
    means: Tensor

    @property
    def shares(self) -> Tensor:
        """[L, HQ, 3], adding up to 1."""
        return self.means / self.means.sum(-1, keepdim=True)


@lru_cache(8)
def gates_of(model: str, seed: int = 1337) -> Gates:
    """Of a preset's first layer as it starts, or of all layers of a checkpoint that `nsa train`
    wrote: a file, or a folder of which the newest counts. ValueError for what is neither."""
    path = Path(model)
    if path.suffix == ".pt" or path.is_dir():
        try:
            state = saving.newest(path) if path.is_dir() else saving.read(path)
        except OSError as error:
            raise ValueError(f"no weights in {model}: {error}") from None
        made = saving.model_of(state)
        name = f"{path.name}, after {state['steps_done']} steps"
    else:
        # deeper layers start alike, and the largest preset takes a second to read a text
        made = LanguageModel(preset(model, layers=1))
        made.reset_parameters(seed)
        name = f"{model}'s first layer before training"
    return Gates(name, _means(made, seed))


@torch.no_grad()
def _means(model: LanguageModel, seed: int) -> Tensor:
    found = []

    def keep(layer, inputs):
        found.append(layer.arguments(inputs[0])["gates"][0].float().mean(0))

    layers = [m for m in model.modules() if isinstance(m, NSAAttention)]
    if not layers:
        raise ValueError("dense attention has no gates; name a model with attention='nsa'")
    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        model(data.text(seed=seed).batch(0, 1, TOKENS)[0])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)
