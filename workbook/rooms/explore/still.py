"""Data of the site's explorer, which has no kernel: what each query of a few examples sees.

`python -m workbook.rooms.explore.still` writes explorer-data.js and explorer.png into the site's
folder; its script draws the data and computes nothing.
"""

import json
from pathlib import Path
from typing import Any

from nsa.blocks import compressed_span
from workbook.rooms.explore import example, panels
from workbook.runs.files import write_atomically
from workbook.runs.site import pages

STATIC = pages.HERE / "static"
# Preset, T and kind of queries; the first is that of notebook 90_explore's defaults.
SHOWN = [
    ("repro", 512, "random"), ("repro", 512, "correlated"), ("production", 4096, "random"),
    ("production", 4096, "correlated"),
]  # fmt: skip
LEVELS = 9  # of importance, a digit a block; "-" is a block that has not begun


def data(model: str, tokens: int, queries: str) -> dict[str, Any]:
    """Collect what each drawn query of an example sees, by branch, as plain values.

    rows: positions [R]; covered: tokens before this one are under its compressed keys [R]; blocks:
    selected [R][n]; importance: [R] texts, a digit a block; keys: (cmp, slc, win) counted [R].
    """
    panel = panels.definition(model, tokens, queries=queries)
    one = panels.example_of(panel.start)
    config, rows = one.config, one.rows.tolist()
    scores, blocks = one.selected
    span = compressed_span(config)
    counted = [example.keys_seen(one.choice, t) for t in rows]
    ends = [(seen["cmp"] - 1) * span.stride + span.length if seen["cmp"] else 0 for seen in counted]
    return {
        "name": f"{model}, T {tokens}, {queries} queries",
        "tokens": tokens,
        "window": config.window,
        "block": config.select_block,
        "rows": rows,
        "covered": ends,
        "blocks": [[j for j in line if j >= 0] for line in blocks.tolist()],
        "importance": [
            _digits(line, t // config.select_block + 1)
            for t, line in zip(rows, scores.tolist(), strict=True)
        ],
        "keys": [[seen[branch] for branch in example.BRANCHES] for seen in counted],
    }


def _digits(scores: list[float], begun: int) -> str:
    top = max(scores[:begun], default=0.0) or 1.0
    shown = "".join(str(round(LEVELS * max(0.0, x) / top)) for x in scores[:begun])
    return shown + "-" * (len(scores) - begun)


def write(folder: Path = STATIC) -> None:
    """Write the data of all examples as a script, and a picture of the first."""
    found = json.dumps([data(*shown) for shown in SHOWN], separators=(",", ":"))
    write_atomically(folder / "explorer-data.js", f"window.nsaExamples = {found};\n")
    panel = panels.definition(*SHOWN[0][:2], queries=SHOWN[0][2])
    write_atomically(folder / "explorer.png", panel.kept["keys seen"]().png(**panel.start))


if __name__ == "__main__":
    write()
