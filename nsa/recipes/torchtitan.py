"""NSA as a model of torchtitan 0.3: configs, sharding, names in Hugging Face's layout.

    torchrun --nproc-per-node 8 -m torchtitan.train --module nsa.recipes.torchtitan --config small

`--module` accepts any importable module, so nothing is registered in torchtitan. Supported: data
parallelism over any number of ranks (FSDP2, HSDP), activation checkpointing, compilation layer by
layer and torchtitan's checkpoints, also in Hugging Face's layout; no tensor, context or pipeline
parallelism.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.protocols import BaseModel, ModelSpec, StateDictAdapter
from torchtitan.trainer import Trainer

from nsa.model.config import ModelConfig
from nsa.model.flops import step_flops
from nsa.model.llama import Block, LanguageModel
from nsa.model.presets import preset

LAYERS = "blocks"  # the layers' name in a LanguageModel; torchtitan's is "layers"
HEAD = "head.weight", "lm_head.weight"  # its name in a LanguageModel, and in NSAForCausalLM
BASE = "model."  # before all other names in NSAForCausalLM


class NSAModel(LanguageModel, BaseModel):
    """LanguageModel with the interface of torchtitan's Trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        model: ModelConfig

        def update_from_config(self, *, config: Trainer.Config, **_: Any) -> None:
            """Do nothing: the trainer's config does not change the model."""

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """(number of parameters, operations of a training step per token)."""
            flops = step_flops(self.model, seq_len, 1).total // seq_len
            return sum(p.numel() for p in model.parameters()), flops

    def __init__(self, config: "NSAModel.Config") -> None:
        super().__init__(config.model)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, **_: Any) -> Tensor:
        """Logits [B, T, V]. Where positions [B, T] restart at 0, a new document begins, which does
        not see those before it."""
        if positions is None:
            return super().forward(tokens)[0]
        first = positions == 0
        first[:, 0] = True
        end = torch.tensor([tokens.numel()], device=tokens.device)
        borders = torch.cat([first.flatten().nonzero()[:, 0], end]).int()
        x = self.hidden(tokens.view(1, -1), borders)
        return self.logits(x.view(*tokens.shape, -1))  # the logits must not be a view

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule, also by torchtitan's name for the layers."""
        return super().get_submodule(LAYERS if target == "layers" else target)

    def verify_module_protocol(self) -> None:
        """Do nothing: layers here are plain torch modules, which `init_states` initializes."""

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Draw the weights layer by layer: each rank draws a whole layer and keeps its shards, so
        that initialization does not depend on the number of ranks."""
        with torch.device(self.norm.weight.device):
            ends = LanguageModel(self.config.with_(layers=1, checkpoint=""))
            for index, layer in enumerate(self.get_submodule("layers")):
                _keep_shards(layer, Block(self.config, index))
        for name in ("embed_tokens", "norm", "head"):
            _keep_shards(getattr(self, name), getattr(ends, name))


def _keep_shards(mine: nn.Module, whole: nn.Module) -> None:
    for parameter, full in zip(mine.parameters(), whole.parameters(), strict=True):
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            full = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)
        parameter.copy_(full)


def parallelize(
    model: NSAModel,
    *,
    parallel_dims: Any,
    training: TrainingConfig,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> NSAModel:
    """Recompute, compile and shard each layer, and then the rest. ValueError for parallelism that
    splits heads or sequences, which no NSA kernel supports."""
    has_not = [n for n in ("tp", "cp", "pp", "ep") if getattr(parallel_dims, f"{n}_enabled")]
    if has_not:
        got = ", ".join(f"{n} = {getattr(parallel_dims, n)}" for n in has_not)
        raise ValueError(f"NSA in torchtitan is sharded by FSDP2 alone, and {got}; 1 would do")
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        for layer in model.get_submodule("layers"):
            layer.compile(backend=compile_config.backend)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,  # angles stay in fp32
    )
    names = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    names += ["fsdp" if parallelism.spmd_backend == "partial_dtensor" else "dp_shard"]
    options = {"mesh": parallel_dims.get_mesh(names), "mp_policy": policy}
    options["reshard_after_forward"] = parallelism.fsdp_reshard_after_forward != "never"
    for layer in model.get_submodule("layers"):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)  # the trainer divides by the tokens of all ranks
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can sum, and not scale
    return model


class HFNames(StateDictAdapter):
    """Parameter names of nsa.hf.NSAForCausalLM, for checkpoints in Hugging Face's layout."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        ours, theirs = HEAD
        return {theirs if name == ours else BASE + name: x for name, x in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        ours, theirs = HEAD
        given = hf_state_dict.items()
        return {ours if name == theirs else name.removeprefix(BASE): x for name, x in given}


def spec(model: ModelConfig) -> ModelSpec:
    """Return the `model_spec` of a Trainer.Config for such a model."""
    return ModelSpec(
        name="nsa",
        flavor=model.name,
        model=NSAModel.Config(model=model),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=HFNames,
    )


def small() -> Trainer.Config:
    """Starting config: the preset "production" with the tokenizer in hf_assets_path; every field
    can be set on the command line."""
    model = preset("production", vocab=128256)
    return Trainer.Config(
        model_spec=spec(model),
        loss=CrossEntropyLoss.Config(global_vocab_size=model.vocab),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200),
        # A step reads the starts of documents, for which the host waits.
        training=TrainingConfig(
            local_batch_size=1, seq_len=8192, steps=1000, disable_cuda_graphs=True
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(enable=True, interval=500),
        activation_checkpoint=FullAC.Config(),
    )
