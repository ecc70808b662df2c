"""Facts of the settlement that the trials run here and the kept runs decide.

The rebuilt loop dispatches about half as many operations as are quoted of the case study's code
(335,529 at T 1024 where 725,490 are): ratios within the rebuilt loop are what these facts use.
"""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from nsa.experiments.case_study.loop.design import parameters, production
from nsa.experiments.case_study.settlement.reread import furthest, too_short
from nsa.experiments.case_study.settlement.sources import Sources

Found = dict[str, Any]
PCIE = 1e9  # bytes a second, a sixteenth of what its report assumes


def cell(found: Found, path: str, tokens: int = 64, batch: int = 1) -> Found:
    """The row of the trial `operations`."""
    for row in found["rows"]:
        if (row["path"], row["tokens"], row["batch"]) == (path, tokens, batch):
            return row
    raise LookupError(f"no row of {path} at T {tokens}, batch {batch}")


def growth(key: str, path: str):
    """That figure at T 128 over T 64."""

    def value(see: Sources) -> float:
        found = see["trial:operations"]
        return cell(found, path, 128)[key] / cell(found, path)[key]

    return value


def a_token(key: str):
    """That figure of the loop for each further token, from T 64 to 128."""

    def value(see: Sources) -> float:
        found = see["trial:operations"]
        return (cell(found, "loop", 128)[key] - cell(found, "loop")[key]) / 64

    return value


def slowdown(arm: str):
    """Median seconds of a step of that arm over the plain one's."""

    def value(see: Sources) -> float:
        steps = see["trial:deadlines"]["step_s"]
        return median(steps[arm]) / median(steps["plain"])

    return value


def _pace(see: Sources) -> float:
    steps = see["trial:deadlines"]["step_s"]["plain"]
    half = len(steps) // 2
    return median(steps[half:]) / median(steps[:half])


def _lines(see: Sources) -> list[Found]:
    return see["trial:print-schedule"]["rows"]


def _said(see: Sources) -> float:
    """Steps between a run's last line before step 13 and its print policy's `first`."""
    return max(abs((row["last_line_at_step_13"] or 0) - row["first"]) for row in _lines(see))


def _policies(see: Sources) -> float:
    return len({row["last_line_at_step_13"] for row in _lines(see)})


def _ended(see: Sources) -> float:
    """The fewest steps that a run ended, by its own last line."""
    return min(int(row["lines"][-1].split()[1]) for row in _lines(see))


def _alike(see: Sources) -> float:
    """Lines in which the loop and dense masks differ under the same policy."""
    by_path = {
        r["path"]: r["lines"] for r in _lines(see) if r["first"] == 5 and not r["checkpoint"]
    }
    loop, masked = by_path["loop"], by_path["masked"]
    return sum(a != b for a, b in zip(loop, masked, strict=True))


def _checkpointed(see: Sources) -> float:
    """Lines in which the checkpointed loop differs from the plain one."""
    arms = {r["checkpoint"]: r["lines"] for r in _lines(see) if r["path"] == "loop"}
    return sum(a != b for a, b in zip(arms[True], arms[False], strict=True))


def _batches(see: Sources) -> float:
    seconds, said = see["trial:batch"]["step_s"], see["BATCH_TOKENS_PER_S"]
    one, two = (median(seconds[str(batch)]) for batch in (1, 2))
    return (2 * one / two) / (said[4] / said[2])


def _pcie(see: Sources) -> float:
    """Share of a step that its bytes take on the bus: gradients to the other GPU and back, tokens
    and targets, and what .item() reads, at a rate a sixteenth of the one that the report names."""
    tokens = 2048 * 2
    moved = 2 * 4 * parameters(production()) + 16 * tokens + 8 * 12 * tokens * a_token("syncs")(see)
    return moved / PCIE / (tokens / see["BATCH_TOKENS_PER_S"][2])


def _laptop(see: Sources) -> float:
    """The laptop's seconds a token over those of 12 layers of the rebuilt loop here, of the tiny
    design, of which a layer is the fastest."""
    here = cell(see["trial:operations"], "loop", 128)
    return 1 / see["LAPTOP_TOKENS_PER_S"] / (12 * here["seconds"] / here["layers"] / 128)


def _nodes(see: Sources) -> float:
    """Autograd nodes of 12 layers at T 2048, by those of a token and layer of the rebuilt loop."""
    return 12 * 2048 * a_token("nodes")(see)


def _grown(see: Sources) -> float:
    return sum(row["changed"] != row["should"] for row in see["trial:state"]["rows"])


def _graph_grown(see: Sources) -> float:
    rows = {row["what"]: row for row in see["trial:state"]["rows"]}
    return rows["graph nodes"]["after"] - rows["graph nodes"]["before"]


def _fewer(see: Sources) -> float:
    """Largest share of all branches' operations that one branch alone dispatches, here."""
    found = see["trial:branches"]
    return max(found[b]["operations"] for b in ("cmp", "slc", "win")) / found["all"]["operations"]


def _programs(see: Sources) -> float:
    return len({row["operations"] for row in see["trial:backends"].values()})


def _losses(see: Sources) -> float:
    losses = [row["loss"] for row in see["trial:backends"].values()]
    return max(losses) - min(losses)


def _finite(see: Sources) -> float:
    found = see["trial:fp16-adamw"]
    kinds = ("float32", "bfloat16")
    return sum(not math.isfinite(float(x)) for n, x in found.items() if n.startswith(kinds))


def _nan(see: Sources) -> float:
    found = see["trial:fp16-adamw"]
    return sum(not math.isfinite(float(found[f"float16 {g}"])) for g in ("0", "0.0001"))


def _reached(arm: str):
    return lambda see: see["run:step5"]["reached"][arm]


def _behind(arm: str):
    """Steps that the plain trial that came least far was ahead of that arm, on a GPU."""
    return lambda see: min(see["run:step5"]["plain"]) - _reached(arm)(see)


def _crossed(see: Sources) -> float:
    """Factor by which a step is too long, less the operations that one torch version saves."""
    return too_short(see) / see["run:versions"]["operations"]


def _gpu(see: Sources) -> float:
    """Of dense masks for the loop, how much less time over how much fewer operations."""
    run = see["run:step5"]
    return run["seconds"]["loop"] / run["seconds"]["masked"]


def _allocators(see: Sources) -> float:
    found, tables = see["trial:allocators"]["mib"], see["TABLES_MB"]
    saved = {int(t): arms["default"] - arms["expandable"] for t, arms in found.items()}
    return furthest(saved[t] / (first - second) for t, (first, second) in tables.items())


def _table_here(see: Sources) -> float:
    found = see["trial:allocators"]["mib"]
    return furthest(arms["default"] / see["MEMORY_MIB"][int(t)] for t, arms in found.items())


VALUES: dict[str, Callable[[Sources], float]] = {
    "last-line-is-the-policys": _said,
    "policies-differ": _policies,
    "silent-runs-end": _ended,
    "loop-prints-alike": _alike,
    "checkpointed-prints-alike": _checkpointed,
    "traced-is-slower": slowdown("traced"),
    "aux-stats-explain-1-of-5": slowdown("aux stats"),
    "pace-slackens": _pace,
    "fall-is-reproduced": _batches,
    "operations-by-the-token": growth("operations", "loop"),
    "masks-by-the-layer": growth("operations", "masked"),
    "a-million-nodes": _nodes,
    "syncs-by-the-token": a_token("syncs"),
    "written-out": lambda see: see["trial:operations"]["attention_calls"],
    "laptop-is-faster": _laptop,
    "pcie-takes-time": _pcie,
    "something-grows": _grown,
    "graph-grows": _graph_grown,
    "graph-is-circular": lambda see: see["trial:graph"]["back_edges"],
    "freeing-takes-long": lambda see: (
        see["trial:graph"]["free_s"] / see["trial:graph"]["forward_s"]
    ),
    "late-binding-is-wrong": lambda see: min(see["trial:checkpointing"]["late"]["errors"][:-1]),
    "bound-is-wrong": lambda see: max(see["trial:checkpointing"]["bound"]["errors"]),
    "loop-compiles": lambda see: see["trial:recompiles"]["eager"],
    "writing-takes-time": lambda see: (
        see["trial:beside-the-step"]["write_s"] / see["trial:beside-the-step"]["step_s"]
    ),
    "loading-takes-time": lambda see: (
        see["trial:beside-the-step"]["data_s"] / see["trial:beside-the-step"]["step_s"]
    ),
    "syncs-take-half": lambda see: see["trial:syncs"]["share"],
    "first-key-only": lambda see: see["trial:one-query"]["from_first_value"],
    "first-key-is-not-attention": lambda see: see["trial:one-query"]["from_attention"],
    "right-mask-is-nan": lambda see: see["trial:boolean-mask"]["right_not_finite"],
    "right-mask-leaks": lambda see: see["trial:boolean-mask"]["right_on_the_future"],
    "inverted-mask-is-nan": lambda see: see["trial:boolean-mask"]["inverted_written_out_nan"],
    "fp16-breaks": _nan,
    "fp32-breaks": _finite,
    "eps-is-zero": lambda see: see["trial:fp16-adamw"]["eps_in_fp16"],
    "branches-differ-here": _fewer,
    "backends-differ-here": _programs,
    "backends-agree-here": _losses,
    "in-place-differs": lambda see: see["trial:in-place"]["difference"],
    "in-place-raises": lambda see: see["trial:in-place"]["raised"],
    "env-is-json": lambda see: see["trial:harness"]["env_documents"],
    "timeout-lies": lambda see: see["trial:harness"]["timeout_says"],
    "minus-inf-breaks": lambda see: see["trial:dense-mask"]["gradient_error"],
    "many-calls-cost": lambda see: see["trial:dense-mask"]["calls_over_one"],
    "duplicates-are-arbitrary": lambda see: see["trial:duplicates"]["gradient_error"],
    "duplicates-slow": lambda see: see["trial:duplicates"]["indexing_slowdown"],
    "varlen-is-wrong": lambda see: see["trial:varlen"]["error"],
    "varlen-is-square": lambda see: see["trial:varlen"]["bytes_at_twice_the_length"],
    "scores-are-kept": lambda see: see["trial:pruning"]["bytes_kept"],
    "detaching-changes-gradients": lambda see: see["trial:pruning"]["gradient_difference"],
    "fragmentation-stalls": lambda see: see["trial:fragmentation"]["seconds"],
    "memory-fragments": lambda see: see["trial:fragmentation"]["reserved_over_allocated"],
    "trials-stand-still": lambda see: see["run:step5"]["standing still"],
    "observed-stand-still": lambda see: see["run:step5"]["watched standing still"],
    "deadline-moves": lambda see: (
        see["run:step5"]["by deadline"][1] - max(see["run:step5"]["plain"])
    ),
    "layers-move": lambda see: min(see["run:step5"]["plain"]) - see["run:step5"]["by layers"][1],
    "aux-stats-stop-at-1": _reached("aux stats"),
    "traced-comes-less-far": _behind("tracing"),
    "blocking-comes-less-far": _behind("launch blocking"),
    "time-falls-with-operations": _gpu,
    "fsdp-saves-memory": lambda see: (
        see["run:sharding"]["mib"]["fsdp"] / see["run:sharding"]["mib"]["ddp"]
    ),
    "fsdp-is-faster": lambda see: (
        see["run:sharding"]["tokens_per_s"]["fsdp"] / see["run:sharding"]["tokens_per_s"]["ddp"]
    ),
    "compiled-recompiles": lambda see: see["run:sharding"]["recompilations"],
    "ranks-hang": lambda see: see["run:ranks"]["not ended"],
    "ranks-disagree": lambda see: see["run:ranks"]["largest error"],
    "versions-cross-the-limit": _crossed,
    "versions-dispatch-alike": lambda see: see["run:versions"]["operations"],
    "versions-lose-alike": lambda see: see["run:versions"]["losses"],
    "allocator-is-the-other": _allocators,
    "rebuilt-holds-the-table": _table_here,
}
