"""Check the pictures against the formulas for every query that is drawn."""

from nsa.blocks import count_compressed
from workbook.rooms.explore import panels
from workbook.rooms.explore.example import BRANCHES, Example, forced_blocks
from workbook.runs.claim import Claim, verdict_of
from workbook.runs.live import Panel


def facts(definition: Panel) -> list[tuple[str, bool]]:
    """Statements about the panel's first picture, each with its truth value. The formulas are
    written out here; the picture comes from the reference."""
    example = panels.example_of(definition.start)
    config, rows = example.config, example.rows.tolist()
    size, each = config.select_block, {branch: example.sees[branch] for branch in BRANCHES}
    blocks = [[j for j in line if j >= 0] for line in example.selected[1].tolist()]
    due = [min(config.select_count, t // size + 1) for t in rows]
    future = example.rows > example.rows[:, None]
    window = (example.rows > example.rows[:, None] - config.window) & ~future
    covered = [_covered(t, config) for t in rows]
    shown = [line.nonzero().flatten().tolist() for line in each["cmp"]]
    weights = [example.at(t).weights for t in (rows[0], rows[len(rows) // 2], rows[-1])]
    sums = [float(w[branch].sum()) for w in weights for branch in BRANCHES]
    return [
        ("no query of any branch sees a later token",
         not any(bool((mask & future).any()) for mask in each.values())),
        (f"compressed keys cover the tokens before ((t + 1 - l) // d) d + l, l = "
         f"{config.compress_block} and d = {config.compress_stride}, and none while t + 1 < l",
         all([rows[i] for i in seen] == [s for s in rows if s < end]
             for seen, end in zip(shown, covered, strict=True))),
        (f"a query selects min(n = {config.select_count}, blocks begun) blocks, forced ones first",
         all(len(line) == count and {*forced_blocks(t, config)} <= {*line}
             for t, line, count in zip(rows, blocks, due, strict=True))),
        ("in the selected branch it sees its blocks, up to itself", all(
            {s // size for s, on in zip(rows, mask, strict=True) if on}
            == {s // size for s in rows if s <= t and s // size in line}
            for t, mask, line in zip(rows, each["slc"].tolist(), blocks, strict=True))),
        (f"a window holds the newest w = {config.window} tokens",
         bool((each["win"] == window).all())),
        ("the weights of a branch add up to 1, or to 0 where it sees none",
         all(min(abs(total), abs(total - 1)) < 1e-4 for total in sums)),
    ]  # fmt: skip


def _covered(query: int, config) -> int:
    """First token not covered by any compressed key that the query sees."""
    count = count_compressed(query + 1, config)
    return (count - 1) * config.compress_stride + config.compress_block if count else 0


def all_claims(definition: Panel) -> list[Claim]:
    """Claim that the pictures match the formulas."""
    found = facts(definition)
    broken = [sentence for sentence, holds in found if not holds]
    example: Example = panels.example_of(definition.start)
    evidence = {"facts": dict(found), "queries": len(example.rows), "sizes": dict(definition.start)}
    sentence = f"{len(found) - len(broken)} of {len(found)} facts hold of all queries drawn"
    return [Claim(": ".join([sentence, "; ".join(broken)] if broken else [sentence]),
                  verdict_of(not broken), evidence)]  # fmt: skip
