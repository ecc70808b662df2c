"""Lessons that distinguish correct attention from wrong, each learnt in a child process.

Each covers what the others leave out: the window's edge, the blocks that every query sees, blocks
found by their importance, compressed keys alone, and all branches in two layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nsa.config import NSAConfig
from nsa.model.config import ModelConfig
from nsa.model.tasks import Copy, Needle, Recall
from nsa.model.train_config import TrainConfig
from workbook.lab import sweep
from workbook.rooms.correctness.learning import SOLVED, Lesson, Stage, learn

ENTRY = "workbook.rooms.correctness.lessons:learn_one"
WANTED = {True: f"at least {SOLVED}", False: "about chance: out of reach"}
VOCAB = 34
# Five of a head's eight channel pairs rotate by less than a radian in 8192 tokens: what is learnt
# at one distance holds at others.
FAR = {"rope_base": 1e14}
# Curriculum of each lesson: which lesson, on rows of how many blocks. Two layers that see a string
# slightly farther back each time find it by its content; after one large jump they are back at
# chance. A model that can copy has what recall needs; trained on recall alone it plateaus.
STAGES = {
    "selection": (("selection", (8, 32)),),
    "compressed": (("compressed", (8, 32)),),
    "copy": (("copy", (4, 5, 6, 8, 12, 16, 32, 64)),),
    "recall": (("copy", (4, 5, 6, 8)), ("recall", (8, 16, 32, 64))),
}
# Learning rate and warm-up. With two layers, the first learns only once the second does, and both
# forget at a higher rate, or if AdamW, new in each stage, begins with full-size steps.
PACE = {"recall": (1e-3, 200), "copy": (3e-3, 100)}


def learn_all(
    names: Sequence[str],
    tokens: int,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    threads: int | None = None,
    **how: Any,
) -> list[dict]:
    """Run lessons; a row per lesson: `lesson` and the fields of `rows_of`. Duplicates run once.

    `how` is for sweep.measure. Raises ValueError for an unknown lesson before any runs.
    """
    options = {"tokens": tokens, "device": device, "precision": precision}
    specs = {name: {"name": name, **options} for name in names}
    for spec in specs.values():
        lesson(**spec)
    how["name"] = lambda name: f"{name}, T {tokens}"
    rows = rows_of(specs, threads, **how)
    return [{"lesson": name} | row for name, row in rows.items()]


def rows_of(
    specs: Mapping[Any, dict],
    threads: int | None,
    entry: str = ENTRY,
    call: Callable[[Any, dict], dict] = lambda key, spec: spec,
    **how: Any,
) -> dict[Any, dict]:
    """Run `learn_one` for each lesson in a child process; `how` is for sweep.measure.

    A row is `outcome`, `message`, the fields of `learning.Learnt` if it succeeded, and `seconds`.
    call: maps a key and its spec of `learn_one` to the spec of `entry`.
    """

    def spec(key: Any, s: float) -> dict:
        # Training ends early enough to leave time for the questions.
        return call(key, {"lesson": specs[key], "threads": threads, "budget_s": 0.7 * s})

    def said(result: dict) -> str:
        return f"as expected: {result['as_expected']}"

    ended = sweep.measure(entry, list(specs), spec, said=said, **how)
    return {
        key: {"outcome": e.status, "message": e.message, **(e.result or {}), "seconds": e.seconds}
        for key, e in zip(specs, ended, strict=True)
    }


def learn_one(spec: dict[str, Any]) -> dict[str, Any]:
    """Run `learning.learn` in a child. spec: "lesson" (arguments), "threads", "budget_s"."""
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    return learn(lesson(**spec["lesson"]), budget_s=spec["budget_s"])


def answers(rows: Sequence[dict]) -> list[dict]:
    """Lines per question: lesson, question, accuracy, by chance, wanted, steps, peek."""
    return [
        {"lesson": row["lesson"], "question": name, "accuracy": accuracy}
        | {"by chance": row["chance"][name], "wanted": WANTED[row["expected"][name]]}
        | {"steps": row["steps"], "peek": row["peek"]}
        for row in rows
        for name, accuracy in row.get("accuracy", {}).items()
    ]


def lesson(
    name: str,
    tokens: int = 2048,
    *,
    backend: str = "auto",
    device: str = "cpu",
    batch: int = 16,
    precision: str = "fp32",
    **changes: Any,
) -> Lesson:
    """Make a lesson for rows of `tokens` tokens; `changes` are fields of the model.

    Blocks are small, so that a query sees few of them and a needle shows in their mean: l' = l =
    T / 128, but at least 16, d = l / 4, w = 2 l', three blocks per query in one layer.

    A block among many is found by luck first, and learnt only then. So the same model, with the
    block sizes for T, first learns on rows of a few blocks, see STAGES.
    Raises ValueError for an unknown lesson and for T below 64.
    """
    if name not in LESSONS:
        raise ValueError(f"no lesson {name!r}; there are {', '.join(LESSONS)}")
    if tokens < 64:
        raise ValueError(f"tokens={tokens}: a lesson needs at least 64, for blocks to leave out")
    block = max(16, tokens // 128)
    # l, d, l', n (the first and the newest block are always seen), w
    nsa = NSAConfig(block, block // 4, block, 3, select_initial=1, select_local=1, window=2 * block)
    sizes = {"layers": 1, "dim": 64, "heads": 8, "kv_heads": 2, "head_dim": 16, "vocab": VOCAB}
    config = ModelConfig(f"lesson-{name}", **sizes, nsa=nsa, backend=backend)
    # Steps this small are bound by their launches.
    graph = torch.device(device).type == "cuda" and backend in ("auto", "triton")
    how = {"batch": batch, "precision": precision, "seed": 1}
    how["cuda_graph"] = graph and precision in ("fp32", "bf16")

    def stage(name: str, tokens: int) -> Stage:
        _, tasks, asked, steps = LESSONS[name](tokens, block)
        lr, warmup = PACE.get(name, (5e-3, 10))
        train = TrainConfig(tokens=tokens, steps=steps, lr=lr, warmup_steps=warmup, **how)
        # Correct attention solves everything except what is out of its reach.
        return Stage(train, tasks, {where: (t, where != "outside") for where, t in asked.items()})

    model, *_ = LESSONS[name](tokens, block)
    rows = [(other, n * block) for other, counts in STAGES.get(name, ()) for n in counts]
    rows = [one for one in rows if one[1] < tokens] + [(name, tokens)]
    stages = tuple(stage(*one) for one in rows)
    return Lesson(config.with_(**{**model, **changes}), stages, device)


def _needle(low: int, high: int, filler: int = 4) -> Needle:
    return Needle(vocab=VOCAB, values=8, filler=filler, distance=(low, high))


def _two_layers(tokens: int, block: int) -> dict[str, Any]:
    count = max(3, min(8, tokens // block // 4))
    far = {"head_dim": 32, "rope_base": 1e9, "shared_kv": True}
    return {"layers": 2, "dim": 128, "nsa": {"select_count": count}, **far}


# Each lesson: fields of the model, training tasks (alternating), questions, steps.


def window(tokens: int, block: int):
    """Window alone, trained on needles up to w back: w - 1 is the last in reach, w the first out.

    A window with one key more learns both; one with other keys learns neither.
    """
    edge = 2 * block
    inside, last, outside = (1, edge - 1), (edge - 1, edge - 1), (edge, edge)
    asked = {"inside": _needle(*inside), "last": _needle(*last), "outside": _needle(*outside)}
    return {"force_branch": "win"}, (_needle(1, edge),), asked, 200


def blocks(tokens: int, block: int):
    """Selection alone, with untrained scores: a needle in the own or first block is always seen."""
    asked = {"own": _needle(1, block - 1), "first": _needle(tokens - block, tokens - 1)}
    return {"force_branch": "slc"}, tuple(asked.values()), asked, 200


def selection(tokens: int, block: int):
    """Selection alone, scored by the keys that it attends to: a needle in any block.

    Only one of three blocks is free, so importance must rank the needle's block first.
    """
    near, far = (1, block - 1), (block, tokens - block - 1)
    asked = {"own": _needle(*near, filler=1), "far": _needle(*far, filler=1)}
    return {"force_branch": "slc", "shared_kv": True, **FAR}, tuple(asked.values()), asked, 1500


def compressed(tokens: int, block: int):
    """Compressed keys alone: a needle in any block that has ended."""
    far = _needle(2 * block, tokens - 1, filler=1)
    return {"force_branch": "cmp", **FAR}, (far,), {"far": far}, 300


def recall(tokens: int, block: int):
    """All branches, two layers: recall of eight pairs, near and as far back as T allows."""
    near, far = (Recall(vocab=VOCAB, pairs=8, gap=gap) for gap in ((0, tokens - 31), None))
    return _two_layers(tokens, block), (near,), {"far": far}, 3000


def copy(tokens: int, block: int):
    """All branches, two layers: copy of 24 symbols, near and as far back as T allows."""
    near, far = (Copy(vocab=VOCAB, length=24, distance=d) for d in ((25, tokens - 24), None))
    return _two_layers(tokens, block), (near,), {"far": far}, 3000


LESSONS: dict[str, Callable] = {
    make.__name__: make for make in (window, blocks, selection, compressed, recall, copy)
}
