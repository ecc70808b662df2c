"""The models that the workbook measures: the case study's sizes, with three changes.

SwiGLU instead of a SiLU MLP of the same size, the paper's sigmoid gate instead of a softmax one,
and correct keys and scores. With `gate="softmax"` the production model has exactly the case
study's 78,295,332 parameters.
"""

from collections.abc import Callable
from typing import Any

from nsa.config import NSAConfig
from nsa.model.config import ModelConfig
from nsa.spelling import nearest


def repro(layers: int = 5) -> ModelConfig:
    """The case study's small model, on which it looked for hangs, T = 128 to 2048. It has
    1,005,024 parameters with 5 layers."""
    sizes = {"dim": 128, "heads": 8, "kv_heads": 2, "head_dim": 16}
    compressed = {"compress_block": 16, "compress_stride": 8}
    nsa = NSAConfig(**compressed, select_block=32, select_count=8, window=64)
    return ModelConfig("repro", layers, **sizes, nsa=nsa)


def cpu_test() -> ModelConfig:
    """Two layers of `repro`, for T = 512 on a CPU. 441,408 parameters."""
    return repro(layers=2).with_(name="cpu_test")


def smoke(layers: int = 6) -> ModelConfig:
    """The case study's RTX 3090 smoke run: T = 1024. 4,708,080 parameters."""
    return repro(layers).with_(name="smoke", dim=256, head_dim=32, nsa={"window": 256})


def step5() -> ModelConfig:
    """One layer of `smoke`, on which the case study looked for its step-5 hang: T = 1024. It has
    894,120 parameters."""
    return smoke(layers=1).with_(name="step5")


def production(layers: int = 12) -> ModelConfig:
    """The case study's "125M" model, with the paper's block sizes: T = 2048. 78,578,736 parameters
    with 12 layers; it is this small because of the byte vocabulary."""
    return ModelConfig(name="production", layers=layers, dim=768, heads=12, kv_heads=2, head_dim=64)


def memory_table() -> ModelConfig:
    """The case study's memory table, batch 1 and T = 128 to 2048 in fp32: `production` with five
    layers. 32,970,964 parameters."""
    return production(layers=5).with_(name="memory_table")


def cpu_config() -> ModelConfig:
    """The case study's CPU configuration, T = 512 and batch 2: `production` with every layer
    recomputed in the backward. 78,578,736 parameters. (Its report said two layers.)"""
    return production().with_(name="cpu_config", checkpoint="all")


PRESETS: dict[str, Callable[..., ModelConfig]] = {
    make.__name__: make
    for make in (repro, step5, smoke, cpu_test, production, memory_table, cpu_config)
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """Return a preset with some fields changed, `nsa={...}` included. Raises ValueError for an
    unknown preset or field, with the nearest."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]().with_(**changes)


def dense_twin(
    config: ModelConfig, *, backend: str = "auto", same_parameters: bool = False
) -> ModelConfig:
    """The same model with dense attention: same width, layers, heads, rotary and initialisation.

    It lacks two of the three K/V projections, the gates and a learned phi, so it has fewer
    parameters: 73,550,592 beside `production`'s 78,578,736. That is the fair comparison of time,
    since all common matrices are equal. `same_parameters` widens its MLPs to make up for these, to
    the nearest multiple of 16 (24 dim parameters per layer), for a comparison of losses.
    """
    twin = config.with_(
        attention="dense",
        backend=backend,
        force_branch=None,
        share_selection=1,
        name=f"{config.name}-dense",
    )
    if not same_parameters:
        return twin
    import torch  # here, so that a preset's name and fields are checked before it is loaded

    from nsa.model.dense_attention import DenseAttention
    from nsa.model.layer import NSAAttention

    with torch.device("meta"):
        missing = sum(p.numel() for p in NSAAttention(config.with_(backend="auto")).parameters())
        missing -= sum(p.numel() for p in DenseAttention(twin).parameters())
    return twin.with_(mlp_hidden=config.mlp_size + round(missing / (3 * config.dim) / 16) * 16)
