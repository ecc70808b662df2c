"""Claims of distributed tracing, each decided by rows and never by hand."""

from collections.abc import Callable
from itertools import combinations

from workbook.rooms.tracing import table
from workbook.rooms.tracing.trials import Traced, Trial
from workbook.runs.claim import Claim, Undecided, claim

GRADIENT_LIMIT = {"fp32": 1e-6}  # of a gradient's largest value
LOSS_LIMIT = {"fp32": 1e-5}
COARSE = 1e-2  # of other precisions, with more rounding
UNTRACED = "it was not traced to its end"


def all_claims(traced: Traced) -> list[Claim]:
    """All claims; those about a trial that was not traced, or did not end, are INCONCLUSIVE."""
    clean = [t for t in traced.trials if not t.fault and t.name != "static graph + find unused"]
    faulty = [t for t in traced.trials if t.fault]
    return [
        every_trial_ended(traced),
        *(gradients_arrive(traced, trial) for trial in clean),
        modules_run_in_one_order(traced),
        branches_are_different_programs(traced),
        gradients_are_one_process(traced),
        buckets_hold_every_parameter(traced),
        buckets_are_cut_anew(traced),
        static_graph_trains_the_same(traced),
        contradiction_is_refused(traced),
        *(fault_is_named(traced, trial) for trial in faulty),
        only_arrivals_tell(traced),
    ]


@claim(lambda traced: f"all {len(traced.trials)} trials ended, or were refused, on every rank")
def every_trial_ended(traced: Traced):
    """Claim that all trials ended or were refused on every rank; else names the first failure."""
    ends = {f"{row['trial']}, rank {row['rank']}": row["status"] for row in traced.outcomes}
    bad = [row for row in traced.outcomes if row["status"] not in ("ok", "refused")]
    if not ends:
        raise Undecided(UNTRACED)
    if not bad:
        return "", True, ends, (t.name for t in traced.trials if not traced.of(t.name))
    first = next((row for row in bad if row["first"]), bad[0])
    where = f"; {first['trial']!r}, rank {first['rank']}: {first['status']} at {first['place']}"
    if all(row["status"] in ("timeout", "oom") for row in bad):
        raise Undecided("it had no time or no memory", ends, where)
    return where, False, ends


@claim("{trial.name}")
def gradients_arrive(traced: Traced, trial: Trial):
    """Claim that each expected gradient arrives in every step, in one order on all ranks."""
    if not traced.ended(trial.name):
        raise Undecided(UNTRACED, found="every gradient arrives")
    rows = table.frame(traced, "arrivals", trial.name)
    first = rows[(rows["step"] == 1) & (rows["rank"] == 0)]
    due = int((first["expected"] == "arrived").sum())
    rightly = set(first[first["expected"] == "missing"]["parameter"])
    wrong = rows[rows["state"] != rows["expected"]]
    apart = table.by_rank(rows).query("not same")
    ranks = traced.setup.ranks
    order = f" on all {ranks} ranks, in one order" if ranks > 1 else " on the one rank"
    rest = f", and rightly none for the other {len(rightly)}" if rightly else ""
    named = [row["unreachable"] for row in traced.of(trial.name)]
    graph = None in named or all(set(names) == rightly for names in named)
    told = "" if graph else "; the graph before the backward says otherwise"
    evidence = {
        "unexpected": sorted(set(wrong["parameter"]))[:20],
        "ranks differ": sorted(set(apart["parameter"]))[:20],
        "file": "arrival_by_rank.csv",
    }
    holds = due > 0 and not len(wrong) and not len(apart) and graph
    return f"a gradient for each of {due} parameters{order}{rest}{told}", holds, evidence


@claim("module backwards run in one order on all ranks")
def modules_run_in_one_order(traced: Traced):
    """Claim that backwards enter modules in the same order on all ranks, in clean trials."""
    clean = [t.name for t in traced.trials if not t.fault and traced.ended(t.name)]
    rows = table.frame(traced, "modules", *clean)
    if traced.setup.ranks < 2:
        raise Undecided("there is one rank")
    if not clean or not len(rows):
        raise Undecided(UNTRACED)
    apart = []
    for (trial, step), mine in rows.sort_values("order").groupby(["trial", "step"], sort=False):
        orders = {tuple(group["module"]) for _, group in mine.groupby("rank")}
        if len(orders) > 1 or mine["rank"].nunique() < traced.setup.ranks:
            apart.append(f"{trial}, step {step}")
    found = f"{rows['module'].nunique()} modules in {rows['trial'].nunique()} trials"
    evidence = {"ranks differ": apart, "file": "module_order.csv"}
    return found, not apart, evidence, _lost(traced, lambda trial: not trial.fault)


@claim("each branch alone is another program than all three")
def branches_are_different_programs(traced: Traced):
    """Claim that forced branches change the loss; else a program is compared with itself."""
    names = ["ddp", *(trial.name for trial in traced.trials if trial.branch and not trial.fault)]
    losses = {name: traced.losses(name)[0] for name in names if traced.losses(name)}
    if len(losses) < 2:
        raise Undecided(UNTRACED)
    equal = [f"{a} = {b}" for a, b in combinations(losses, 2) if losses[a] == losses[b]]
    found = f"{', '.join(equal)} in the first loss" if equal else f"{len(losses)} first losses"
    return found, not equal, losses, _lost(traced, lambda trial: trial.name in names)


@claim(
    lambda traced: (
        f"gradients of {traced.setup.ranks} rank{'s' if traced.setup.ranks > 1 else ''} "
        f"are one process's to {_limit(GRADIENT_LIMIT, traced):g}"
    )
)
def gradients_are_one_process(traced: Traced):
    """Claim that gradients equal one process's for the same rows: same sums, except the mean."""
    rows = table.frame(traced, "gradients")
    ended = [trial.name for trial in traced.trials if traced.ended(trial.name)]
    mine = rows[(rows["way"] == "rows") & rows["trial"].isin(ended)]
    if not len(mine):
        raise Undecided(UNTRACED)
    worst = mine["error"].fillna(float("inf")).groupby(mine["trial"], sort=False).max()
    limit = _limit(GRADIENT_LIMIT, traced)
    bad = [f"{trial} {error:.1g}" for trial, error in worst.items() if not error <= limit]
    found = f": {', '.join(bad)}" if bad else f" in {', '.join(worst.index)}"
    return found, not bad, worst.to_dict(), _lost(traced)


@claim("the buckets of every step and rank hold each parameter once")
def buckets_hold_every_parameter(traced: Traced):
    """Claim that bucket traces are complete: they lose no elements, and fire on all ranks."""
    totals, wrong = [], []
    for name in (trial.name for trial in _bucketed(traced)):
        parameters = traced.of(name)[0]["parameters"]
        for step, by_rank in table.layouts(traced, name).items():
            for rank, elements in by_rank.items():
                totals.append(sum(elements))
                if sum(elements) != parameters:
                    wrong.append(f"{name}, step {step}, rank {rank}: {sum(elements):,}")
            if len({tuple(e) for e in by_rank.values()}) > 1 or len(by_rank) < traced.setup.ranks:
                wrong.append(f"{name}, step {step}: ranks differ")
    if not totals:
        raise Undecided(UNTRACED)
    found = f"; not {wrong[0]}" if wrong else f"{max(totals):,} elements"
    return found, not wrong, {"wrong": wrong, "file": "ddp_buckets.csv"}, _lost(traced, _by_ddp)


@claim("buckets are cut anew after step 1, with a static graph after step 2, and never under "
       "find_unused_parameters")  # fmt: skip
def buckets_are_cut_anew(traced: Traced):
    """Claim that buckets are rebuilt after step 1 (static 2), never with find_unused_parameters."""
    found, wrong = {}, []
    for trial in _bucketed(traced):
        by_step = table.layouts(traced, trial.name)
        steps = {step: ranks[min(ranks)] for step, ranks in by_step.items()}
        found[trial.name] = [s for s in steps if s > 1 and steps[s] != steps.get(s - 1)]
        due = [] if trial.find_unused else [3] if trial.static_graph else [2]
        if found[trial.name] != due:
            wrong.append(trial.name)
    if "ddp" not in found:
        raise Undecided(UNTRACED)
    plain = [e for ranks in table.layouts(traced, "ddp").values() for e in ranks.values()]
    if all(len(elements) == 1 for elements in plain):
        raise Undecided("all fits into one bucket", found)
    told = f"; not so: {', '.join(wrong)}" * bool(wrong)
    evidence = {"new buckets from step": found, "file": "ddp_buckets.csv"}
    return told, not wrong, evidence, _lost(traced, _by_ddp)


@claim("a static graph trains the same as DDP without it")
def static_graph_trains_the_same(traced: Traced):
    """Claim that a static graph has the same losses in all steps, so the same updates before."""
    plain, static = traced.losses("ddp"), traced.losses("static graph")
    if not plain or not static:
        raise Undecided(UNTRACED)
    limit = _limit(LOSS_LIMIT, traced)
    apart = max(abs(a - b) / abs(a) for a, b in zip(plain, static, strict=True))
    evidence = {"ddp": plain, "static graph": static}
    return f"losses of {len(plain)} steps to {limit:g}", apart <= limit, evidence


@claim("static_graph with find_unused_parameters is refused, with the reason")
def contradiction_is_refused(traced: Traced):
    """Claim that both options together are refused; torch warns and ignores the second."""
    rows = traced.of("static graph + find unused")
    if not rows or {row["status"] for row in rows} - {"ok", "refused"}:
        raise Undecided(UNTRACED)
    refused = all(row["status"] == "refused" and row["message"] for row in rows)
    return "", refused, {"message": rows[0]["message"]}


@claim("planted {trial.fault!r} is named by the arrival lists")
def fault_is_named(traced: Traced, trial: Trial):
    """Claim that evidence names exactly the spoilt parameters on spoilt ranks, in every step."""
    if not traced.ended(trial.name):
        raise Undecided(UNTRACED)
    state = "zero" if trial.fault == "gate x 0" else "missing"
    ranks = range(traced.setup.ranks)
    due = {(r, name, state) for r in ranks for name in table.planted_in(traced, trial, r)}
    rows = table.frame(traced, "arrivals", trial.name)
    named: dict[int, set] = {step: set() for step in sorted(set(rows["step"]))}
    for row in rows[rows["state"] != rows["expected"]].itertuples():
        named[row.step].add((row.rank, row.parameter, row.state))
    where = sorted({rank for rank, _, _ in due})
    on = "every rank" if len(where) == len(ranks) else f"rank {where[0]} alone"
    found = f"{len({name for _, name, _ in due})} parameters {state} on {on}"
    evidence = {
        "planted": sorted(str((rank, name)) for rank, name, _ in due),
        "named": sorted(str((rank, name)) for rank, name, _ in named.get(1, ())),
    }
    return found, bool(named) and all(seen == due for seen in named.values()), evidence


@claim("nothing but the arrival lists shows a rank's own branch: no error, equal weights")
def only_arrivals_tell(traced: Traced):
    """Claim that only arrivals show a rank's own branch: nothing raises, all weights stay equal."""
    name = "rank branch"
    if traced.setup.ranks < 2:
        raise Undecided("there is one rank")
    if not traced.ended(name):
        raise Undecided(UNTRACED)
    rows = traced.of(name)
    same = table.by_rank(table.frame(traced, "arrivals", name))["same"]
    weights = sorted({row["weights"] for row in rows})
    holds = len(weights) == 1 and not same.all()
    return f" on {len(rows)} ranks", holds, {"weights": weights}


def _bucketed(traced: Traced) -> list[Trial]:
    """Trials under DDP that ended."""
    return [t for t in traced.trials if t.kind == "ddp" and traced.ended(t.name)]


def _limit(limits: dict[str, float], traced: Traced) -> float:
    return limits.get(traced.setup.precision, COARSE)


def _by_ddp(trial: Trial) -> bool:
    return trial.kind == "ddp"


def _lost(traced: Traced, which: Callable[[Trial], bool] = lambda trial: True) -> list[str]:
    """Selected trials that neither trained to their end nor were refused."""
    lost = [t.name for t in traced.trials if which(t) and not traced.ended(t.name)]
    return [n for n in lost if {row["status"] for row in traced.of(n)} != {"refused"}]
