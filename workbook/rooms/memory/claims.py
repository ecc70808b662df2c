"""Claims of the memory notebook, each decided by rows and never by hand."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas

from nsa.model.config import ModelConfig
from workbook.lab.measure.activation_model import MODELLED, activations
from workbook.rooms.case_study import figures as case_study
from workbook.rooms.memory import table
from workbook.runs import looks, metrics
from workbook.runs.claim import ANSWERS, Claim, NotHere, Undecided, aim, claim
from workbook.runs.metrics import model_name
from workbook.runs.rules import NOT_OF_THIS_RUN, different_programs
from workbook.runs.scaling import local_exponents

LIMIT = 1.1  # the largest exponent that still counts as linear
PRODUCTION_LIMIT_GIB = 6.0
PREDICTION_LIMIT = 0.2


def all_claims(df: pandas.DataFrame, rows: Sequence[dict], linear: Sequence[str]) -> list[Claim]:
    """All claims. `rows` are those of memory trials, `linear` the linear backends."""
    return [
        case_study_is_not_quadratic(),
        *(linear_backend_is_linear(df, backend) for backend in linear),
        dense_masks_cost_more(df, linear),
        state_is_sixteen_bytes_a_parameter(rows),
        activations_are_as_predicted(rows),
        backends_are_different_programs(rows),
        production_fits(df),
    ]


@claim("the case study's own table is not T squared")
def case_study_is_not_quadratic():
    """Claim that the case study's table is not quadratic, though it said "O(S^2) confirmed"."""
    local = local_exponents(*zip(*case_study.MEMORY_MIB.items(), strict=True))
    found = "its local exponents are " + ", ".join(f"{p:.2f}" for p in local)
    evidence = {"table": "workbook.rooms.case_study.figures.MEMORY_MIB"}
    return found, (local < 2).all() and local[-1] < 1, evidence


@claim(f"{{backend}} grows at most as T^{LIMIT} towards its longest T")
def linear_backend_is_linear(df: pandas.DataFrame, backend: str):
    """Claim that growing memory is at most T ** LIMIT over the last factor of 4 in T, per model.

    Only T >= n l' count: up to there every query sees every key, whatever the backend.
    """
    dense_up_to = table.dense_up_to(df)
    found, short = {}, set()
    for (model, name), line in table.growing(df).iterrows():
        line = line.dropna()
        if name != backend or len(line) < 2:
            continue
        quarter, dense = line.index[-1] // 4, dense_up_to[model]
        exponent = table.exponent_fit(line, first=max(quarter, dense)).exponent
        if np.isfinite(exponent):
            found[model] = exponent
        elif (line.index >= quarter).sum() > 1:  # else the longest T stands alone
            short.add(dense)
    if found:
        worst = max(found.values())
        evidence = {model: round(exponent, 3) for model, exponent in found.items()}
        lost = _lost(df, [backend], dense_up_to, least=0.25)
        return f"T^{worst:.2f}", worst <= LIMIT, evidence, lost
    rows = looks.over_tokens(df)
    if rows.loc[rows["backend"] == backend, "x_value"].nunique() == 1:
        raise NotHere("this run is of one T")
    if short:
        raise Undecided(f"every query still sees every key up to T = n l' = {min(short)}")
    raise Undecided("no two points of it were measured")


@claim("dense masks cost more than every linear backend")
def dense_masks_cost_more(df: pandas.DataFrame, linear: Sequence[str]):
    """Claim that dense masks cost more at the longest T that masked and a linear one finished, for
    T >= n l', since up to there every query sees every key and a mask leaves nothing out."""
    evidence, ratios, dense_up_to = {}, [], table.dense_up_to(df)
    for model, lines in table.growing(df).groupby(level="model", sort=False):
        lines = lines.droplevel("model")
        names = [name for name in linear if name in lines.index]
        if "masked" not in lines.index or not names:
            continue
        shared = lines.loc[["masked", *names]].dropna(axis=1)
        shared = shared.loc[:, shared.columns >= dense_up_to[model]]
        if shared.shape[1]:
            at = shared.columns[-1]
            ratios.append(float(shared.loc["masked", at] / shared.loc[names, at].max()))
            evidence[model] = {"tokens": int(at), "times": round(ratios[-1], 1)}
    if not ratios:
        there = {*df["backend"]}
        if there and not ("masked" in there and there & {*linear}):
            raise NotHere("this run was not to measure both")
        raise Undecided("no T from n l' on was measured with both")
    found = f"at least {round(min(ratios), 1)} times what grows, at the longest T of both"
    return found, min(ratios) > 1, evidence, _lost(df, ["masked", *linear], dense_up_to)


def _lost(
    df: pandas.DataFrame, backends: Sequence[str], first: Mapping[str, int], least: float = 0.0
) -> list[str]:
    """Points of growing memory that these backends lack, at T of at least `first` of each model and
    the fraction `least` of the longest T planned for one of them that did not decline."""
    rows = table.labelled(df)
    mine = rows[rows["backend"].isin(backends) & ~rows["outcome"].isin(ANSWERS)]
    longest = mine.groupby("model")["x_value"].max()
    start = [max(first[m], least * longest.get(m, 0)) for m in rows["model"]]
    parts = {m for m in rows["metric"] if m.startswith("memory_")}
    parts -= {f"memory_{name}" for name in table.CONSTANT}
    of = {"metric": parts, "backend": {*mine["backend"]}}  # declined backends have none
    return metrics.unmeasured(rows[rows["x_value"] >= start], ["model", "x_value"], of=of)


@claim("weights, gradients and optimizer state are 16 bytes a parameter, to 3 %")
def state_is_sixteen_bytes_a_parameter(rows: Sequence[dict]):
    """Claim that state is fp32 weights, gradients and two moments; a GPU allocator rounds up."""
    strays = []
    for row in _held(rows):
        held = sum(row["held_mib"][n] for n in ("parameters", "gradients", "optimizer_state"))
        strays.append(abs(held * 2**20 / (16 * row["parameters"]) - 1))
    if not strays:
        raise Undecided("no cell ran")
    evidence = {"cells": len(strays), "largest_deviation": round(max(strays), 5)}
    return "", max(strays) <= 0.03, evidence, _not_held(rows)


@claim(f"activations are as predicted from shapes, to {PREDICTION_LIMIT:.0%}")
def activations_are_as_predicted(rows: Sequence[dict]):
    """Claim that memory saved by the forward for the backward matches the sum of its shapes, less
    what is freed until the peak, see `Activations.nearest`."""
    ratios, unknown = {}, set()
    for row in _held(rows):
        if row["backend"].partition(":")[0] not in MODELLED:
            unknown.add(row["backend"])
        elif not row["checkpoint"]:
            config = ModelConfig.from_dict(row["model"])
            kept = activations(
                config, row["tokens"], row["batch"], row["precision"], row["backend"]
            )
            measured = row["held_mib"]["activations"] * 2**20
            name = f"{model_name(row)} {row['backend']} T={row['tokens']}"
            ratios[name] = kept.nearest(measured) / measured
    if not ratios:
        if rows and all(row["checkpoint"] for row in rows):
            raise NotHere("what is recomputed was not kept")
        raise Undecided("nothing that is predicted was measured")
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    evidence = {"cells": len(ratios), "furthest": worst}
    evidence["predicted/measured"] = round(ratios[worst], 3)
    evidence |= {"not predicted": sorted(unknown)} if unknown else {}
    return "", abs(ratios[worst] - 1) <= PREDICTION_LIMIT, evidence, _not_held(rows)


def _not_held(rows: Sequence[dict]) -> list[str]:
    """Cells that neither ran nor declined with a reason."""
    lost = [row for row in rows if row["outcome"] not in ("ok", *ANSWERS)]
    return [f"{model_name(row)} {row['backend']} T={row['tokens']}" for row in lost]


def _held(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if row["outcome"] == "ok" and row["held_mib"]]


def backends_are_different_programs(rows: Sequence[dict]) -> Claim:
    """Claim that backends are different programs, by their path witnesses."""
    found = table.paths(rows).to_dict("index")
    served = {name: tuple(line.values()) for name, line in found.items()}
    planned = {row["backend"]: row["outcome"] for row in rows}
    return different_programs(served, found, "backends", planned)


@aim("a production step of 12 layers at T 2048, batch 1, stays under "
     f"{PRODUCTION_LIMIT_GIB:.0f} GiB")  # fmt: skip
def production_fits(df: pandas.DataFrame):
    """Claim that a production step fits; the case study projected 50 to 151 GB for it."""
    rows = table.labelled(df)
    rows = rows[(rows["metric"] == "peak_memory") & (rows["x_value"] == 2048)]
    rows = rows[rows["model"] == "production, 12 layers"]
    rows = rows.loc[[config.get("batch", 1) == 1 for config in metrics.configs(rows)]]
    if not len(rows):
        raise NotHere(NOT_OF_THIS_RUN)
    gib = rows.dropna(subset="median").set_index("backend")["median"] / 1024
    if not len(gib):
        raise Undecided("no backend got through it")
    found = f"{gib.min():.2f} GiB with {gib.idxmin()}"
    return found, gib.min() < PRODUCTION_LIMIT_GIB, gib.round(3).to_dict()
