"""What can be varied of this package's training step, and what of it does not go together."""

from collections.abc import Callable
from typing import Any

from nsa.lab.search.candidates import word
from nsa.lab.search.factor import (
    COMMON,
    Factor,
    Rule,
    by_name,
    choice,
    on_off,
    or_none,
    positive,
    whole,
)


def _backend(value: Any) -> str:
    from nsa.attention.registry import check_name

    return _told(check_name, value)


def _checkpoint(value: Any) -> str:
    from nsa.model.config import layer_range

    return _told(layer_range, value, 10**6) if isinstance(value, str) else "must be text, as '0:2'"


def _preset(value: Any) -> str:
    from nsa.model.presets import preset

    return _told(preset, value)


def _changes(value: Any) -> str:
    return "" if isinstance(value, dict) else "must be a mapping of ModelConfig's fields"


def _allocator(value: str) -> dict[str, str]:
    # The second name is what torch before 2.9 reads.
    return {"PYTORCH_ALLOC_CONF": value, "PYTORCH_CUDA_ALLOC_CONF": value} if value else {}


def _allocator_legal(value: Any) -> str:
    if not isinstance(value, str) or any(":" not in one for one in value.split(",") if one):
        return "must be text as 'max_split_size_mb:64' or 'expandable_segments:True'"
    return ""


def _told(check: Callable[..., Any], *values: Any) -> str:
    try:
        check(*values)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


TRAINING = by_name(
    Factor("preset", "cpu_test", _preset, "the model, out of nsa.model.presets"),
    choice("branch", "all", ("all", "cmp", "slc", "win"), "all three, or one alone with gate 1"),
    Factor("backend", "auto", _backend, "of all branches"),
    Factor("compressed_backend", None, or_none(_backend), "of this branch; none: as backend"),
    Factor("selected_backend", None, or_none(_backend), "of this branch; none: as backend"),
    Factor("window_backend", None, or_none(_backend), "of this branch; none: as backend"),
    Factor("layers", None, or_none(whole(1)), "none: the preset's"),
    Factor("dim", None, or_none(whole(1)), "width of the model; none: the preset's"),
    Factor("tokens", 128, whole(1), "T, tokens of a sequence"),
    Factor("batch", 1, whole(1), "sequences a step, of all ranks together"),
    choice("dtype", "fp32", ("fp32", "bf16", "fp16"), "autocast over fp32 weights"),
    Factor("checkpoint", "", _checkpoint, "layers recomputed in the backward: '', all or 0:6"),
    on_off("aux_stats", False, "gates, distances and norms of every step", slows=1.4),
    choice("tracing", "off", ("off", "arrival", "modules", "buckets", "all"),
            "gradients' arrival, the modules' order, DDP's buckets", slows=1.2),
    on_off("strict", False, "raise at the first value that is not finite"),
    on_off("safe_packing", True, "off, a specimen: branches are packed behind autograd's back"),
    Factor("allocator", "", _allocator_legal, "PYTORCH_ALLOC_CONF, of a GPU's memory",
           env=_allocator),
    on_off("launch_blocking", False, "CUDA_LAUNCH_BLOCKING=1", slows=2.0,
            env=lambda on: {"CUDA_LAUNCH_BLOCKING": "1"} if on else {}),
    on_off("anomaly", False, "autograd's anomaly mode", slows=3.6),
    on_off("deterministic", False, "torch.use_deterministic_algorithms",
            env=lambda on: {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if on else {}),
    on_off("compile", False, "torch.compile of each block"),
    choice("communication", "auto", ("auto", "gloo", "nccl"), "of several ranks"),
    choice("parallel", "ddp", ("ddp", "fsdp"), "of several ranks"),
    on_off("static_graph", False, "DDP: every step uses the same parameters"),
    on_off("find_unused_parameters", False, "DDP: look for unused parameters each step"),
    choice("device", "auto", ("auto", "cpu", "cuda"), "a GPU where there is one"),
    choice("data", "synthetic", ("synthetic", "text"), "random bytes, or Python's own sources"),
    Factor("lr", 1e-3, positive, "learning rate"),
    Factor("threads", None, or_none(whole(1)), "of torch on the CPU; none: its own choice"),
    Factor("changes", {}, _changes, "further fields of the model's config, as {phi: mlp}"),
)  # fmt: skip


def _branch(branch: str, *backends: str | None) -> str:
    for name, value in zip(("cmp", "slc", "win"), backends, strict=True):
        if value is not None and branch not in ("all", name):
            return f"a backend of {name} has no effect on branch={branch!r}"
    return ""


def _ranks(ranks: int, batch: int) -> str:
    return f"batch={batch} cannot be split over {ranks} ranks" if batch % ranks else ""


def _layers(preset: str, layers: int | None, checkpoint: str) -> str:
    from nsa.model.config import layer_range
    from nsa.model.presets import PRESETS

    return _told(layer_range, checkpoint, layers or PRESETS[preset]().layers)


def _only_of_several(ranks: int, *values: Any) -> str:
    defaults = (False, False, "auto", "ddp")
    return "DDP's options have no effect on one rank" if ranks == 1 and values != defaults else ""


def _gpu(device: str, allocator: str, blocking: bool, communication: str, ranks: int) -> str:
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        return "torch finds no GPU"
    if communication == "nccl" and gpus < ranks:
        return f"NCCL needs a GPU for each of {ranks} rank(s), torch finds {gpus}"
    if not gpus and (allocator or blocking):
        return "allocator and launch_blocking have no effect without a GPU"
    return ""


RULES = (
    Rule(("branch", "compressed_backend", "selected_backend", "window_backend"), _branch),
    Rule(("ranks", "batch"), _ranks),
    Rule(("preset", "layers", "checkpoint"), _layers),
    Rule(("ranks", "static_graph", "find_unused_parameters", "communication", "parallel"),
         _only_of_several),
    Rule(("device", "allocator", "launch_blocking", "communication", "ranks"), _gpu),
    Rule(("static_graph", "find_unused_parameters"),
         lambda static, unused: "static_graph finds unused parameters itself, once"
         if static and unused else ""),
    Rule(("parallel", "static_graph", "find_unused_parameters"),
         lambda kind, static, unused: "static_graph and find_unused_parameters are DDP's"
         if kind != "ddp" and (static or unused) else ""),
    Rule(("ranks", "parallel", "tracing"),
         lambda ranks, kind, tracing: "buckets are DDP's, of several ranks"
         if tracing == "buckets" and (ranks == 1 or kind != "ddp") else ""),
    Rule(("compile", "strict"),
         lambda compiled, strict: "strict looks at values, which a compiled block does not allow"
         if compiled and strict else ""),
    Rule(("compile", "aux_stats", "tracing"),
         lambda compiled, stats, tracing: "a compiled model runs no hooks of its modules"
         if compiled and (stats or tracing in ("modules", "all")) else ""),
    Rule(("safe_packing", "compile"),
         lambda safe, compiled: "the specimen of unsafe packing is not compiled"
         if not safe and compiled else ""),
)  # fmt: skip


def listed() -> str:
    """One line a factor: name, default, what it is; those of every subject first."""
    lines = []
    for name, factor in (COMMON | TRAINING).items():
        choices = "|".join(word(one) for one in factor.choices)
        told = choices or word(factor.default)
        lines.append(f"{name:24}{told:32}{factor.help}")
    return "\n".join(lines)
