"""Sources of facts: the reports' figures, trials, and committed runs, each by its name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whyhung.process.trial import Outcome
from workbook.rooms.case_study import figures
from workbook.runs import metrics
from workbook.runs.files import read_json
from workbook.runs.identity import PACKAGE
from workbook.runs.store import Store

RUNS = PACKAGE.parent / "runs"
Found = dict[str, Any]
# Raised on reading a number if its source has an unexpected form.
MALFORMED = (
    LookupError, StopIteration, TypeError, AttributeError, ArithmeticError, ValueError,
)  # fmt: skip


class Lacking(LookupError):
    """A source that is missing or incomplete; the message names it and the reason."""


class Sources:
    """Sources of facts by name: "MEMORY_MIB", "trial:state", "run:step5"; records which were read.

    found: numbers, by name. lacking: why a source is missing. labels: ids of kept runs.
    """

    def __init__(
        self,
        found: Mapping[str, Any],
        lacking: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.found, self.lacking, self.labels = dict(found), lacking or {}, labels or {}
        self.read: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        if name not in self.found:
            raise Lacking(f"{self.label(name)}: {self.lacking.get(name, 'not there')}")
        return self.found[name]

    def unread(self) -> "Sources":
        """The same sources, with none marked as read."""
        return Sources(self.found, self.lacking, self.labels)

    def label(self, name: str) -> str:
        """Evidence id of a source."""
        return name if name.startswith("trial:") else self.labels.get(name, f"table:{name}")


def sources(
    trials: Mapping[str, Outcome], runs: Mapping[str, str] | None = None, root: Path = RUNS
) -> Sources:
    """The quoted figures, the trials that ended well, and those kept runs below `root`.

    runs: {"step5": "03_step5_hang_bisection-8c596233"}, of READERS; "" if none was named.
    ValueError for a kind of run that no fact reads.
    """
    found = {name: value for name, value in vars(figures).items() if name.isupper()}
    lacking: dict[str, str] = {}
    for name, ended in trials.items():
        if ended.result is None:
            lacking[f"trial:{name}"] = f"{ended.status}, {ended.message}"
        else:
            found[f"trial:{name}"] = ended.result
    named = dict.fromkeys(READERS, "") | dict(runs or {})
    labels = {f"run:{kind}": f"run:{run or kind}" for kind, run in named.items()}
    for kind, run in named.items():
        try:
            found[f"run:{kind}"] = read(kind, run, root)
        except Lacking as error:
            lacking[f"run:{kind}"] = str(error)
    return Sources(found, lacking, labels)


def read(kind: str, run: str, root: Path = RUNS) -> Found:
    """Numbers of that run, or of a record "name.json" in a day's folder; Lacking if it is missing,
    or lacks what its kind needs.

    ValueError for a kind that READERS does not have.
    """
    if kind not in READERS:
        raise ValueError(f"no fact reads a run as {kind!r}; there are {', '.join(READERS)}")
    if not run:
        raise Lacking("no run was named")
    if run.endswith(".json"):
        folder = min(root.glob(f"*/{run}"), default=None)
        if folder is None:
            raise Lacking(f"no record {run!r} in a folder of {root}")
    else:
        try:
            folder = Store(root).find(run)
        except ValueError as error:
            raise Lacking(str(error)) from None
    try:
        return READERS[kind](folder)
    except Lacking:
        raise
    except MALFORMED as error:
        raise Lacking(f"{folder.name} has not what `{kind}` needs: {error!r}") from None


def claimed(folder: Path, *sentences: str) -> Found:
    """Evidence stored with the run's claim that begins with one of `sentences`."""
    for entry in read_json(folder / "verdicts.json", []):
        if entry["claim"].startswith(sentences):
            return entry["evidence"]
    raise Lacking(f"{folder.name} makes no claim {sentences[0]!r}")


def rows(folder: Path, metric: str, **config: Any) -> list[tuple[float, Found]]:
    """(median, config) of the run's rows of that metric with that configuration."""
    frame = metrics.read(folder / "metrics.csv")
    frame = frame[frame["metric"] == metric]
    found = zip(frame["median"], metrics.configs(frame), strict=True)
    wanted = [(value, has) for value, has in found if has == has | config]
    if not wanted:
        raise Lacking(f"{folder.name} has no row of {metric} with {config}")
    return wanted


def step5(folder: Path) -> Found:
    """Numbers of a run of 03: steps reached by variant in one deadline; hung or stalled trials."""
    longer = claimed(folder, "the same run comes further with every longer deadline")
    watched = claimed(
        folder, "no verdict changes under aux stats", "aux stats, tracing and launch blocking"
    )
    layers = claimed(folder, "more layers come less far")
    reached = rows(folder, "steps_reached")
    by_trial = {has["trial"]: value for value, has in reached}
    variants = {name: one["was in step"] for name, one in watched["found"].items()}
    plain = {"path": "loop", "deadline": 1.0, "layers": 1, "lock_at": 0}
    plain |= dict.fromkeys(("aux_stats", "tracing", "blocking"), False)
    still = [has["trial"] for _, has in reached if has["verdict"].startswith(("HANG", "STALLED"))]
    frame = metrics.read(folder / "metrics.csv")
    times = frame[(frame["operation"] == "step") & (frame["metric"] == "latency")]
    of = {(r["backend"], r["x_value"]): r["median"] / 1e3 for r in times.to_dict("records")}
    tokens = min(x for path, x in of if path == "masked")
    return {
        "standing still": len(still),
        "reached": {"plain": by_trial[watched["trials"][0]]} | variants,
        "watched standing still": sum(
            one["verdict"].startswith(("HANG", "STALLED")) for one in watched["found"].values()
        ),
        # the trial that ended is the calibration, which has no deadline
        "plain": [
            value for value, has in reached if has == has | plain and has["old_rule"] != "PASS"
        ],
        "by deadline": longer["found"]["reached"],
        "by layers": layers["found"]["reached"],
        "seconds": {path: of[path, tokens] for path in ("loop", "masked")},
    }


def sharding(folder: Path) -> Found:
    """Numbers of a run of 04 on several ranks: MiB a rank, tokens/s (DDP, FSDP), recompilations."""

    def one(metric: str, parallel: str) -> float:
        eager = rows(folder, metric, parallel=parallel, compile=False, cuda_graph=False)
        return eager[0][0]

    return {
        "mib": {kind: one("peak_memory", kind) for kind in ("ddp", "fsdp")},
        "tokens_per_s": {kind: one("tokens_per_second", kind) for kind in ("ddp", "fsdp")},
        "recompilations": max(value for value, _ in rows(folder, "recompilations")),
    }


def ranks(folder: Path) -> Found:
    """Numbers of a run of 05: trials that neither ended nor were refused, and the gradients'
    largest error against one process."""
    entries = read_json(folder / "verdicts.json", [])
    ended = next(e["evidence"] for e in entries if "trials ended, or were refused" in e["claim"])
    return {
        "not ended": sum(status not in ("ok", "refused") for status in ended.values()),
        "largest error": max(claimed(folder, "gradients of ").values()),
    }


def versions(record: Path) -> Found:
    """Numbers of workbook.rooms.case_study.loop.versions: differences of the loop's operations and
    losses under two versions of torch, the largest over its designs."""
    designs = [one["rows"] for one in read_json(record, {})["designs"]]
    torches = sorted({row["torch"] for rows in designs for row in rows})
    if len(torches) < 2:
        raise Lacking(f"{record.name} has not two versions of torch, but {torches}")
    counts = [[row["forward"] + row["backward"] for row in rows] for rows in designs]
    return {
        "operations": max(max(each) / min(each) for each in counts),
        "losses": max(row["loss_apart"] for rows in designs for row in rows),
    }


READERS: dict[str, Callable[[Path], Found]] = {
    one.__name__: one for one in (step5, sharding, ranks, versions)
}
