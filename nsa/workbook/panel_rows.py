"""Which rows of a metrics table a figure shows: one panel a model, one line a backend."""

from nsa.workbook import looks, metrics


def over_tokens(df):
    """The rows over T in MiB, their numbers as floats."""
    rows = df[(df["x_name"] == "tokens") & (df["unit"] == "MiB")]
    return rows.assign(median=rows["median"].astype(float), x_value=rows["x_value"].astype(float))


def peaks(df, mode: str):
    """The peaks of that mode; ValueError where there is none, with the modes there are."""
    rows = over_tokens(df)
    rows = rows[(rows["metric"] == "peak_memory") & (rows["mode"] == mode)]
    if not len(rows):
        modes = sorted(set(df["mode"]))
        raise ValueError(f"no peak_memory rows over tokens in MiB of mode {mode!r}; modes: {modes}")
    return rows


def models(rows) -> dict:
    """Rows by model, in order of appearance, each sorted by T; of a point measured twice the last.

    So a notebook's cell that is executed again replaces its points.
    """
    rows = rows.assign(model=[metrics.model_name(config) for config in metrics.configs(rows)])
    point = ["model", "backend", "mode", "metric", "x_value"]
    rows = rows.drop_duplicates(point, keep="last")
    return {
        name: frame.sort_values("x_value", kind="stable")
        for name, frame in rows.groupby("model", sort=False)
    }


def by_tokens(rows, values: str, index=("model", "backend")):
    """One line for each `index`, a column for each T; lines in order of appearance."""
    table = rows.pivot_table(
        index=list(index), columns="x_value", values=values, aggfunc="last", sort=False,
        dropna=False,
    )  # fmt: skip
    return table[sorted(table.columns)].rename_axis(columns="T").dropna(how="all")


def backends(frame) -> list[tuple]:
    """(backend, its rows), those of `looks.LOOKS` first and in that order."""
    order = list(looks.LOOKS)
    present = list(dict.fromkeys(frame["backend"]))
    present.sort(key=lambda name: order.index(name) if name in order else len(order))
    return [(name, frame[frame["backend"] == name]) for name in present]


def largest_common(frame) -> float:
    """The largest T that every backend has; where they share none, the largest of any."""
    sets = [set(line["x_value"]) for _, line in backends(frame)]
    return max(set.intersection(*sets) or set.union(*sets))
