"""A trace as a healthy run leaves it, written by hand, for the tests that spoil it."""

from functools import cache

from nsa.model.llama import LanguageModel, parameter_count
from workbook.lab.search.planted import planted, without_gradient
from workbook.rooms.tracing.trials import STEPS, TRIALS, Setup, Traced

SETUP = Setup("cpu_test", tokens=64, batch=2, bucket_mb=0.5)


def healthy(setup=SETUP, trials=TRIALS) -> Traced:
    """Every trial as it should be: faults named, the contradiction refused."""
    found = Traced(setup, tuple(trials), launches=1)
    names, total = _parameters()
    for number, trial in enumerate(trials):
        for rank in range(setup.ranks):
            _add(found, trial, rank, names, total, first_loss=5.5 + number / 100)
    return found


@cache
def _parameters() -> tuple[list[str], int]:
    model = LanguageModel(SETUP.spec(TRIALS[0]).config())
    return [name for name, _ in model.named_parameters()], parameter_count(model)


def _add(found, trial, rank, names, total, first_loss):
    who = {"trial": trial.name, "rank": rank}
    outcome = {"status": "ok", "message": "", "evidence": "", "place": "", "first": False}
    trained = {"losses": [first_loss, 5.0, 4.9], "weights": "same", "parameters": total}
    if trial.static_graph:
        trained["losses"] = [5.5, 5.0, 4.9]
    if trial.static_graph and trial.find_unused:
        trained = dict.fromkeys([*trained, "unreachable"])
        found.outcomes.append(who | outcome | trained | {"status": "refused", "message": "why"})
        return
    none = without_gradient(found.setup.spec(trial).config(), names)
    spoilt, state = set(), ""
    if trial.fault:
        fault = planted(trial.fault, found.setup.spec(trial).config(), found.setup.ranks)
        spoilt, state = set(fault.parameters) if rank in fault.ranks else set(), fault.state
    trained["unreachable"] = [n for n in names if n in none] if trial.kind == "ddp" else None
    found.outcomes.append(who | outcome | trained)
    for step in range(1, STEPS + 1):
        order = 0
        for name in reversed(names):
            arrives = not (name in none or (name in spoilt and state == "missing"))
            row = {"step": step, "parameter": name}
            row["state"] = state if name in spoilt else "arrived" if arrives else "missing"
            row["expected"] = "missing" if name in none else "arrived"
            row |= {"order": order, "ms": order / 10} if arrives else {"order": None, "ms": None}
            found.arrivals.append(who | row)
            order += arrives
        for order, module in enumerate(("head", "blocks.1", "blocks.0", "embed")):
            row = {"step": step, "module": module, "order": order, "ms": float(order)}
            found.modules.append(who | row)
        if trial.kind == "ddp":
            cut = trial.find_unused or step > (2 if trial.static_graph else 1)
            parts = [total // 2, total - total // 2] if cut else [total]
            for index, elements in enumerate(parts):
                row = {"step": step, "index": index, "elements": elements, "bytes": 4 * elements}
                row |= {"dtype": "float32", "is_last": index == len(parts) - 1, "ms": 1.0}
                found.buckets.append(who | row)
    if trial.compared:
        for way, error in (("rows", 0.0), ("batch", 3e-7)):
            found.gradients.append({**who, "way": way, "error": error, "parameter": names[0]})
