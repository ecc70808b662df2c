"""What a training step must hold whatever its backend does, from shapes alone."""

from dataclasses import dataclass

import torch

from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel


@dataclass(frozen=True)
class Prediction:
    """Bytes. `fixed` is there at every T; one T x T tensor per head costs `quadratic` a layer."""

    weights: int
    gradients: int
    optimizer_state: int
    quadratic: int  # 0 for a backend that holds none

    @property
    def fixed(self) -> int:
        """Weights, gradients and optimizer state: what the optimizer's phase holds at least."""
        return self.weights + self.gradients + self.optimizer_state


def predict(config: ModelConfig, tokens: int, batch: int = 1, backend: str = "") -> Prediction:
    """Exact for the parts named, with fp32 weights: 4 bytes a parameter for the weight, 4 for its
    gradient, 8 for AdamW's moments, and 4 for each parameter tensor's step count.

    `quadratic` is what one fp32 [B, HQ, T, T] tensor costs in one layer, for the backends that hold
    such tensors; how many they keep is theirs to say. `backend` replaces the config's; "auto"
    counts as one that holds none. ValueError for an unknown backend, or sizes below 1.
    """
    from nsa.attention.registry import check_name, get

    if tokens < 1 or batch < 1:
        raise ValueError(f"tokens={tokens} and batch={batch} must be at least 1")
    name = check_name(backend or config.backend)
    with torch.device("meta"):
        parameters = list(LanguageModel(config).parameters())
    count = sum(p.numel() for p in parameters)
    holds = name != "auto" and get(name).quadratic
    return Prediction(
        weights=4 * count,
        gradients=4 * count,
        optimizer_state=8 * count + 4 * len(parameters),
        quadratic=4 * batch * config.heads * tokens**2 if holds else 0,
    )
