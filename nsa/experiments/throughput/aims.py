"""What training is meant to reach: the 12-layer production model in bf16 on an H200."""

import pandas

from nsa.experiments.throughput import table as throughput_table
from nsa.experiments.throughput.table import PLAIN
from nsa.workbook.claim import Claim, verdict_of

TOKENS_S = 250_000
TOKENS = 2048
TWIN_STEP = 1.25
LONG = 16384
TWO_RANKS = 1.9
WATCHED = 1.15
LOSS_STEPS = 500
LOSS_SHARE = 0.02


def aims(df: pandas.DataFrame, backend: str = "triton") -> list[Claim]:
    """Each aim with what was measured; INCONCLUSIVE where this run cannot tell."""
    return [
        is_fast(df, backend),
        is_near_the_twin(df, backend),
        beats_the_twin_when_long(df, backend),
        two_ranks_pay(df, backend),
        watching_costs_little(df),
        learns_as_the_twin(df),
    ]


def is_fast(df: pandas.DataFrame, backend: str) -> Claim:
    """One GPU at T 2048."""
    sentence = f"{backend} trains at least {TOKENS_S:,} tokens/s at T {TOKENS}"
    line = _aimed(df, "tokens_per_second", backend)
    if isinstance(line, str) or TOKENS not in line:
        return _undecided(sentence, line)
    speed = float(line[TOKENS])
    return Claim(f"{sentence}: {speed:,.0f}", verdict_of(speed >= TOKENS_S), {"tokens/s": speed})


def is_near_the_twin(df: pandas.DataFrame, backend: str) -> Claim:
    """The same batch at T 2048."""
    sentence = f"{backend}'s step at T {TOKENS} takes at most {TWIN_STEP} of the dense twin's"
    ours, dense = (_aimed(df, "step_time", name) for name in (backend, "dense"))
    for line in (ours, dense):
        if isinstance(line, str) or TOKENS not in line:
            return _undecided(sentence, line)
    ratio = float(ours[TOKENS] / dense[TOKENS])
    evidence = {backend: float(ours[TOKENS]), "dense": float(dense[TOKENS])}
    return Claim(f"{sentence}: {ratio:.3f}", verdict_of(ratio <= TWIN_STEP), evidence)


def beats_the_twin_when_long(df: pandas.DataFrame, backend: str) -> Claim:
    """At every T from 16k on that both were measured at."""
    sentence = f"{backend} trains faster than the dense twin from T {LONG} on"
    ours, dense = (_aimed(df, "tokens_per_second", name) for name in (backend, "dense"))
    for line in (ours, dense):
        if isinstance(line, str):
            return _undecided(sentence, line)
    ratio = (ours / dense).dropna()
    ratio = ratio[ratio.index >= LONG]
    if not len(ratio):
        return _undecided(sentence, "no such T was measured with both")
    found = {f"T {t}": round(float(r), 3) for t, r in ratio.items()}
    text = f"{sentence}: {ratio.min():.2f} times at least, at T {ratio.idxmin()}"
    return Claim(text, verdict_of(bool(ratio.min() > 1)), found)


def two_ranks_pay(df: pandas.DataFrame, backend: str) -> Claim:
    """DDP with twice the batch, however else it was run."""
    sentence = f"two GPUs train at least {TWO_RANKS} times the tokens/s of one, with DDP"
    why = _not_aimed(df)
    if why:
        return _undecided(sentence, why)
    table = throughput_table.scaling(df).reset_index()
    table = table[(table["backend"] == backend) & (table["ranks"] == 2)]
    table = table[(table["parallel"] == "ddp") & _production(table["model"])]
    table = table.dropna(subset="times one rank")
    times = table["times one rank"]
    if not len(times):
        return _undecided(sentence, "not measured in this run")
    where = [f"T {t} {how}".strip() for t, how in zip(table["T"], table["how"], strict=True)]
    found = {name: round(float(x), 3) for name, x in zip(where, times, strict=True)}
    text = f"{sentence}: {times.min():.3f}"
    return Claim(text, verdict_of(bool(times.min() >= TWO_RANKS)), found)


def watching_costs_little(df: pandas.DataFrame) -> Claim:
    """All observers on, beside the same steps with none."""
    sentence = f"with all observers on a step takes at most {WATCHED} of one with none"
    why = _not_aimed(df)
    if why:
        return _undecided(sentence, why)
    rows = throughput_table.over_tokens(df, "observing", variant=None)
    rows = rows[_production(rows["model"]) & rows["median"].notna()]
    if not len(rows):
        return _undecided(sentence, "not measured in this run")
    found = {f"{row.backend} T {row.x_value}": round(row.median, 3) for row in rows.itertuples()}
    worst = max(found.values())
    return Claim(f"{sentence}: {worst:.3f}", verdict_of(worst <= WATCHED), found)


def learns_as_the_twin(df: pandas.DataFrame) -> Claim:
    """The last tenth of the curves; fewer steps than 500 do not tell.

    NSA's are all its backends' together: what they compute is the same, so each is a sample more.
    """
    sentence = f"after {LOSS_STEPS} steps NSA's loss is within {LOSS_SHARE:.0%} of the twin's"
    rows = throughput_table.labelled(df)
    rows = rows[(rows["metric"] == "loss") & rows["median"].notna()]
    if not len(rows) or rows["steps"].min() < LOSS_STEPS:
        return _undecided(sentence, f"no curves of {LOSS_STEPS} steps in this run")
    final = throughput_table.final_losses(df).mean(axis=1)
    if "dense" not in final.index or len(final) < 2:
        return _undecided(sentence, "not both were trained")
    off = final.drop("dense").mean() / final["dense"] - 1
    return Claim(
        f"{sentence}: {off:+.2%}",
        verdict_of(bool(abs(off) <= LOSS_SHARE)),
        {name: round(float(nats), 4) for name, nats in final.items()},
    )


def _aimed(df: pandas.DataFrame, metric: str, backend: str) -> pandas.Series | str:
    """The values by T of the production model's plain cells on an H200, or why there are none."""
    why = _not_aimed(df)
    if why:
        return why
    rows = throughput_table.over_tokens(df, metric)
    rows = rows[_production(rows["model"]) & (rows["backend"] == backend)]
    rows = rows[(rows["variant"] == PLAIN) & rows["median"].notna()]
    return rows.set_index("x_value")["median"] if len(rows) else f"{backend} was not measured"


def _production(models: pandas.Series) -> pandas.Series:
    return models == "production, 12 layers, bf16"


def _not_aimed(df: pandas.DataFrame) -> str:
    if not len(df) or df["gpu"].isin(["", "cpu"]).any():
        return "a CPU's times say nothing about a GPU"
    gpu = df["gpu"].iloc[0]
    return "" if "H200" in gpu else f"the aims are for an H200, this is {gpu}"


def _undecided(sentence: str, why) -> Claim:
    reason = why if isinstance(why, str) else f"T {TOKENS} was not measured"
    return Claim.undecided(sentence, reason)
