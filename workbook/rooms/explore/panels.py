"""Panel of the notebook: the definition at chosen sizes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nsa.config import NSAConfig
from nsa.model.presets import PRESETS, preset
from nsa.spelling import choice
from workbook.lab.measure.shapes import QUERIES
from workbook.rooms.explore import example, gates, plots
from workbook.rooms.explore.example import MOST_HEADS, MOST_TOKENS, Choice, Example
from workbook.runs.live import Panel

# Controls of sizes: (label: the paper's name, description, range of values shown).
POWERS = [2**n for n in range(18)]
SIZES = {
    "compress_block": ("l", "tokens under one compressed key", (4, 256)),
    "compress_stride": ("d", "tokens between the starts of two compressed blocks", (2, 128)),
    "select_block": ("l'", "tokens in a selectable block", (4, 256)),
    "window": ("w", "newest tokens a query sees", (4, 4096)),
}


def sizes_of(name: str) -> dict[str, Any]:
    """Block sizes of a preset and its G; ValueError for an unknown one."""
    config = preset(name)
    nsa = {size: getattr(config.nsa, size) for size in (*SIZES, "select_count")}
    return nsa | {"group": config.heads // config.kv_heads}


def definition(
    model: str = "repro",
    tokens: int = 512,
    query: int = -1,
    queries: str = "random",
    weights: str = "",
    **sizes: int,
) -> Panel:
    """Make a panel of what a query sees, the selection and the gates, at a preset's sizes or at
    `sizes` (0 keeps the preset's). query: -1 for three quarters of T. weights: a checkpoint
    whose gates replace the preset's. Raises ValueError for what cannot be drawn."""
    choice("queries", queries, QUERIES)
    given = sizes_of(model) | {name: value for name, value in sizes.items() if value}
    query = 3 * tokens // 4 if query < 0 else query
    start = {"model": model, "tokens": tokens, **given, "queries": queries, "query": query}
    example_of(start).at(query)
    gates.gates_of(weights or model)

    def one(query: int, **values: Any):
        return example_of(values), query

    def shares(query: int, model: str, **values: Any):
        return example_of(values), gates.gates_of(weights or model)

    views = {
        "keys seen": lambda: plots.seen().fed(one),
        "selection": lambda: plots.selection().fed(one),
        "gates": lambda: plots.gates().fed(shares),
    }

    def told(query: int, **values: Any) -> list[str]:
        return example.sentences(example_of(values), query)

    span = (plots.BEGIN, plots.END)
    return Panel(start, {}, told, _controls, _adjust, "query", span, views, plots.GRIPS)


def example_of(values: Mapping[str, Any]) -> Example:
    """Return the example of these panel values."""
    sizes = {name: value for name, value in values.items() if name not in ("model", "query")}
    return _example(**sizes)


@lru_cache(4)
def _example(tokens: int, group: int, queries: str, **sizes: int) -> Example:
    return Example(Choice(tokens, group, queries=queries, config=NSAConfig(**_fitting(sizes))))


def _fitting(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes with forced blocks reduced to fit a small n; the paper forces three."""
    usual = replace(NSAConfig(), select_count=max(3, sizes["select_count"]))
    forced = {"select_initial": usual.select_initial, "select_local": usual.select_local}
    if sizes["select_count"] < 3:
        forced = {"select_initial": 0, "select_local": sizes["select_count"]}
    return {**sizes, **forced}


def _controls(start: Mapping[str, Any]) -> dict[str, Any]:
    import ipywidgets as widgets

    narrow = {"layout": {"width": "230px"}, "style": {"description_width": "52px"}}

    def powers(name: str, label: str, about: str, low: int, high: int):
        options = sorted({*(p for p in POWERS if low <= p <= high), start[name]})
        return widgets.SelectionSlider(
            options=options, value=start[name], description=label, tooltip=about, **narrow
        )

    made = {
        "model": widgets.Dropdown(
            options=list(PRESETS), value=start["model"], description="preset", **narrow
        ),
        "tokens": powers("tokens", "T", "tokens in the sequence", 16, MOST_TOKENS),
    }
    for name, (label, about, (low, high)) in SIZES.items():
        made[name] = powers(name, label, about, low, high)
    made["select_count"] = widgets.IntSlider(
        start["select_count"], 1, max(32, start["select_count"]), description="n",
        tooltip="blocks a query attends to", **narrow,
    )  # fmt: skip
    made["group"] = powers("group", "G", "query heads on one KV head", 1, MOST_HEADS)
    made["queries"] = widgets.ToggleButtons(options=QUERIES, value=start["queries"])
    made["queries"].style.button_width = "auto"
    made["query"] = widgets.IntSlider(
        start["query"], 0, start["tokens"] - 1, readout=False, tooltip="the query; drag it",
        layout={"width": "100%"},
    )  # fmt: skip
    return made


def _adjust(controls: Mapping[str, Any], name: str, value: Any) -> None:
    """Apply a preset's sizes; for a new T, keep the query at the same relative position."""
    if name == "model":
        for size, there in sizes_of(value).items():
            if there not in getattr(controls[size], "options", [there]):
                controls[size].options = sorted({*controls[size].options, there})
            controls[size].value = there
    if name == "tokens":
        query = controls["query"]
        share = (query.value + 0.5) / (query.max + 1)
        at = min(value - 1, int(share * value))
        if at > query.max:
            query.max = value - 1
            query.value = at
        else:
            query.value = at
            query.max = value - 1
