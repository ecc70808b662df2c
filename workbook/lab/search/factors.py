"""Factors of trials: those of every subject, and those of this package's training step.

Other subjects may have arbitrary settings: a factor unknown here is passed on to the subject.
"""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nsa.spelling import nearest
from workbook.lab.options import Options, Steps
from workbook.lab.search.candidates import word
from workbook.lab.training import TrainingSpec

TRAINING_SUBJECT = "workbook.lab.search.training_subject:make"
ENVIRONMENT = "env."  # env.NAME: an environment variable of any subject's process
CALLED = {
    "T": "tokens", "S": "tokens", "dtypes": "dtype", "precision": "dtype", "version": "python",
}  # fmt: skip
SWITCH = (False, True)
Legal = Callable[[Any], str]  # the requirement a value violates, "" if it is legal


@dataclass(frozen=True)
class Factor:
    """A factor that trials can vary."""

    name: str
    default: Any
    legal: Legal | tuple[Any, ...]  # a check, or the choices
    help: str
    # "settings": passed to the subject; "spec", "deadline", "observer": of the trial itself
    place: str = "settings"
    env: Callable[[Any], dict[str, str]] = lambda value: {}  # variables to set before Python starts
    # Slowdown of a step at a non-default value; above 1 the factor is an observer, which does not
    # change the training.
    slows: float = 1.0

    def check(self, value: Any) -> Any:
        """Return the value; ValueError with the requirement if it is not legal."""
        if wrong := self._wrong(value):
            raise ValueError(f"{self.name}={value!r}: {wrong}")
        return value

    def _wrong(self, value: Any) -> str:
        if callable(self.legal):
            return self.legal(value)
        if self.legal == SWITCH:
            return "" if isinstance(value, bool) else "must be true or false"
        return "" if value in self.legal else f"is unknown; {nearest(value, self.legal)}"


@dataclass(frozen=True)
class Rule:
    """An invalid combination: `when` takes the factors named by its parameters; `why`: the reason.

    If `why` is empty, `when` returns the reason, or "" if the combination is valid.
    """

    when: Callable[..., Any]
    why: str = ""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.when).parameters)

    def broken(self, settings: dict[str, Any]) -> str:
        """Return the reason why these settings cannot run, "" if they can."""
        found = self.when(*(settings[name] for name in self.names))
        return (self.why or found) if found else ""


def known(subject: str) -> dict[str, Factor]:
    """Return the known factors of a subject."""
    return COMMON | TRAINING if subject == TRAINING_SUBJECT else COMMON


def rules(subject: str) -> tuple[Rule, ...]:
    """Return the rules for invalid combinations of a subject."""
    return RULES if subject == TRAINING_SUBJECT else ()


def find(subject: str, name: str) -> Factor | None:
    """Return the factor of that name; None if unknown, for other subjects.

    Raises ValueError for an unknown factor of the training subject, naming the nearest.
    """
    factors = known(subject)
    if name in factors:
        return factors[name]
    if name.startswith(ENVIRONMENT) and len(name) > len(ENVIRONMENT):
        variable = name.removeprefix(ENVIRONMENT)
        return Factor(
            name, "", text, f"the environment variable {variable}", place="spec",
           env=lambda value: {variable: value} if value else {},
        )  # fmt: skip
    if subject != TRAINING_SUBJECT:
        return None
    raise ValueError(f"unknown factor {name!r}; {nearest(CALLED.get(name, name), factors)}")


def listed() -> str:
    """One line per factor: name, default, description; factors of every subject first."""
    lines = []
    for name, factor in (COMMON | TRAINING).items():
        default, legal = factor.default, factor.legal
        values = [default] if callable(legal) else sorted(legal, key=lambda one: one != default)
        lines.append(f"{name:24}{'|'.join(map(word, values)):32}{factor.help}")
    return "\n".join(lines)


def must(be: str, holds: Callable[[Any], bool]) -> Legal:
    return lambda value: "" if holds(value) else f"must be {be}"


def whole(least: int) -> Legal:
    return must(
        f"a whole number of at least {least}",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least,
    )


def or_none(legal: Legal) -> Legal:
    return lambda value: "" if value is None else legal(value)


def refused(check: Callable[..., Any], *values: Any) -> str:
    """Return the check's error message for these values, "" if it passes."""
    try:
        check(*values)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


text = must("text; put it in quotes", lambda value: isinstance(value, str))
positive = must(
    "a number greater than 0",
    lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1e9,
)
_interpreter = must(
    "the path of a Python interpreter that can be run",
    lambda v: v is None or (isinstance(v, str) and shutil.which(v) is not None),
)
_argv = must("text, or a list of words", lambda v: isinstance(v, str | int | float | list))
_changes = must("a mapping of ModelConfig's fields", lambda value: isinstance(value, dict))
_allocator = must(
    "text as 'max_split_size_mb:64' or 'expandable_segments:True'",
    lambda v: isinstance(v, str) and all(":" in one for one in v.split(",") if one),
)


def _backend(value: Any) -> str:
    from nsa.attention import known

    if said := refused(known.check, str(value)):  # without torch
        return said
    from nsa.attention.registry import check_name

    return refused(check_name, value)


def _checkpoint(value: Any) -> str:
    from nsa.model.config import layer_range

    return (
        refused(layer_range, value, 10**6) if isinstance(value, str) else "must be text, as '0:2'"
    )


def _preset(value: Any) -> str:
    from nsa.model.presets import preset

    return refused(preset, value)


def of_spec(
    name: str, default: Any = None, legal: Any = None, *, field: str = "", place: str = "settings"
) -> Factor:
    """Factor of a field of TrainingSpec or of a training's options, by default of the same name.

    Its help is the field's; so are its default, and what is legal, unless they are given.
    """
    owners = (owner.__dataclass_fields__ for owner in (TrainingSpec, Options, Steps))
    found = next(known[field or name] for known in owners if (field or name) in known)
    limits = found.metadata
    if legal is None:
        legal = whole(limits["least"]) if "least" in limits else limits.get("choices", SWITCH)
    default = found.default if default is None else default
    return Factor(name, default, legal, limits["help"], place=place)


# The second name of the allocator's variable is for torch before 2.9.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without which cuBLAS is not deterministic
# Values set by `conservative`; none of these factors may be given with it.
CONSERVATIVE = {"backend": "masked", "dtype": "fp32", "deterministic": True, "compile": False}
COMMON = {factor.name: factor for factor in (
    of_spec("ranks", place="spec"),
    of_spec("seed", place="spec"),
    Factor("python", None, _interpreter, "another interpreter, with its own torch", place="spec"),
    Factor("argv", "", _argv, "words of a script, as '--lr 0.1' or a list; {name} in them is the "
           "setting of that name", place="spec"),
    Factor("deadline_factor", 1.0, positive, "times the plan's deadline_s", place="deadline"),
    Factor("measure", False, SWITCH, "time and memory of each step, from idle to idle device",
           place="observer", slows=1.05),
    Factor("count", False, SWITCH, "with measure: operations and nodes of one more step",
           place="observer", slows=1.01),
    Factor("memory_snapshot", None, or_none(whole(0)), "a step, counted from 0, whose memory is "
           "told by category, module and line of source", place="observer", slows=2.0),
)}  # fmt: skip
TRAINING = {factor.name: factor for factor in (
    of_spec("preset", "cpu_test", _preset),
    Factor("branch", "all", ("all", "cmp", "slc", "win"), "all three, or one alone with gate 1"),
    of_spec("backend", legal=_backend),
    Factor("compressed_backend", None, or_none(_backend), "of this branch; none: as backend"),
    Factor("selected_backend", None, or_none(_backend), "of this branch; none: as backend"),
    Factor("window_backend", None, or_none(_backend), "of this branch; none: as backend"),
    of_spec("layers", legal=or_none(whole(1))),
    Factor("dim", None, or_none(whole(1)), "width of the model; none: the preset's"),
    of_spec("tokens", 128),
    of_spec("batch"),
    of_spec("dtype", legal=("fp32", "bf16", "fp16"), field="precision"),
    of_spec("checkpoint", legal=_checkpoint),
    Factor("aux_stats", False, SWITCH, "gates, distances and norms of every step", slows=1.4),
    Factor("tracing", "off", ("off", "arrival", "modules", "buckets", "all", "updates"),
           "gradients' arrival, the modules' order, DDP's buckets, all three; or updates: how many "
           "weights a step changes", slows=1.2),
    Factor("strict", False, SWITCH, "raise at the first value that is not finite"),
    Factor("safe_packing", True, SWITCH,
           "off, a specimen: branches are packed behind autograd's back"),
    Factor("planted", "", ("", "root"),
           "root, a specimen: torch.where around a sqrt of 0, whose gradients are NaN"),
    Factor("allocator", "", _allocator, "PYTORCH_ALLOC_CONF, of a GPU's memory",
           env=lambda value: dict.fromkeys(ALLOCATOR, value) if value else {}),
    Factor("launch_blocking", False, SWITCH, "CUDA_LAUNCH_BLOCKING=1", slows=2.0,
           env=lambda on: {"CUDA_LAUNCH_BLOCKING": "1"} if on else {}),
    # Up to 3.1 was measured, for cpu_test with one layer at T 48; the case study has 3.6.
    Factor("anomaly", False, SWITCH, "autograd's anomaly mode", slows=3.6),
    Factor("deterministic", False, SWITCH, "torch.use_deterministic_algorithms",
           env=lambda on: CUBLAS if on else {}),
    of_spec("compile"),
    Factor("conservative", False, SWITCH,
           "all optimisations off: dense masks, fp32, deterministic, AdamW one tensor at a time",
           env=lambda on: CUBLAS if on else {}),
    Factor("weights", "fp32", ("fp32", "bf16"),
           "bf16, a specimen: no fp32 weights behind them, which the Trainer itself refuses"),
    Factor("communication", "auto", ("auto", "gloo", "nccl"), "of several ranks"),
    of_spec("parallel", "ddp", ("ddp", "fsdp")),
    of_spec("static_graph"),
    of_spec("find_unused_parameters", field="find_unused"),
    of_spec("bucket_mb", 25, positive),
    of_spec("comm_hook"),
    Factor("gradient_as_bucket_view", True, SWITCH, "DDP: off, gradients are held twice"),
    Factor("device", "auto", ("auto", "cpu", "cuda"), "a GPU where there is one"),
    of_spec("data", "synthetic"),
    of_spec("lr", legal=positive),
    Factor("warmup_steps", 10, whole(1), "until it is reached; 1 is none"),
    Factor("threads", None, or_none(whole(1)), "of torch on the CPU; none: its own choice"),
    of_spec("changes", {}, _changes),
)}  # fmt: skip


def _branch(branch, compressed_backend, selected_backend, window_backend) -> str:
    own = {"cmp": compressed_backend, "slc": selected_backend, "win": window_backend}
    for name, value in own.items():
        if value is not None and branch not in ("all", name):
            return f"a backend of {name} has no effect on branch={branch!r}"
    return ""


def _layers(preset, layers, checkpoint) -> str:
    from nsa.model.config import layer_range
    from nsa.model.presets import PRESETS

    return refused(layer_range, checkpoint, layers or PRESETS[preset]().layers)


def _ddp(
    ranks, communication, parallel, static_graph, find_unused_parameters, bucket_mb, comm_hook,
    gradient_as_bucket_view,
) -> str:  # fmt: skip
    from nsa.model.parallel import check

    given = {"static_graph": static_graph, "find_unused_parameters": find_unused_parameters}
    given |= {"bucket_mb": bucket_mb, "comm_hook": comm_hook}
    given["gradient_as_bucket_view"] = gradient_as_bucket_view
    if ranks > 1:
        return refused(lambda: check(parallel, **given))
    plain = "auto", "ddp", False, False, 25, "none", True
    alone = (communication, parallel, *given.values()) == plain
    return "" if alone else "DDP's options have no effect on one rank"


def _conservative(
    conservative, backend, compressed_backend, selected_backend, window_backend, dtype, compile
) -> str:
    """Return an error if factors given with `conservative` contradict it, else ""."""
    own = compressed_backend, selected_backend, window_backend
    given = {"backend": backend, "dtype": dtype, "compile": compile}
    wrong = [
        f"{name}={word(value)}"
        for name, value in given.items()
        if value not in (TRAINING[name].default, CONSERVATIVE[name])
    ]
    wrong += ["a branch's own backend"] * any(value is not None for value in own)
    if not conservative or not wrong:
        return ""
    return f"conservative turns all optimisations off, {', '.join(wrong)} turns one on"


def _gpu(device, allocator, launch_blocking, communication, ranks) -> str:
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        return "torch finds no GPU"
    if communication == "nccl" and gpus < ranks:
        return f"NCCL needs a GPU for each of {ranks} rank(s), torch finds {gpus}"
    if not gpus and (allocator or launch_blocking):
        return "allocator and launch_blocking have no effect without a GPU"
    return ""


RULES = (
    Rule(_branch),
    Rule(lambda ranks, batch:
         f"batch={batch} cannot be split over {ranks} ranks" if batch % ranks else ""),
    Rule(_layers),
    Rule(_ddp),
    Rule(_gpu),
    Rule(_conservative),
    Rule(lambda weights, dtype, ranks: weights != "fp32" and (dtype != "fp32" or ranks > 1),
         "bf16 weights are a specimen of one rank without autocast"),
    Rule(lambda tracing, comm_hook: tracing in ("buckets", "all") and comm_hook != "none",
         "buckets are traced by a communication hook, and DDP takes one only"),
    Rule(lambda ranks, parallel, tracing:
         tracing == "buckets" and (ranks == 1 or parallel != "ddp"),
         "buckets are DDP's, of several ranks"),
    Rule(lambda compile, count: compile and count,
         "a compiled step runs fused kernels: its operations are not counted"),
    Rule(lambda compile, strict: compile and strict,
         "strict looks at values, which a compiled block does not allow"),
    Rule(lambda compile, aux_stats, tracing:
         compile and (aux_stats or tracing in ("modules", "all")),
         "a compiled model runs no hooks of its modules"),
    Rule(lambda safe_packing, compile: compile and not safe_packing,
         "the specimen of unsafe packing is not compiled"),
)  # fmt: skip
