"""All facts of the settlement: re-read tables, trials run here, and a run that was kept."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nsa.experiments.case_study.settlement import loop_facts as settlement_loop_facts
from nsa.experiments.case_study.settlement import part_facts as settlement_part_facts
from nsa.experiments.case_study.settlement.fact import Fact
from nsa.experiments.case_study.settlement.measured import measured
from nsa.experiments.case_study.settlement.reread import reread
from nsa.experiments.case_study.settlement.trials import Ended
from nsa.workbook.files import read_json
from nsa.workbook.identity import PACKAGE
from nsa.workbook.store import Store


def all_facts(
    trials: Mapping[str, Ended], *, memory_run: str = "", root: str | Path = PACKAGE.parent / "runs"
) -> dict[str, Fact]:
    """Every fact by name. `memory_run` is a kept run of 01_memory_scaling below `root`."""
    asked = (*settlement_loop_facts.ASKED, *settlement_part_facts.ASKED)
    found = [*reread(), *measured(asked, trials), _kept_production_run(memory_run, Path(root))]
    return {fact.name: fact for fact in found}


def _kept_production_run(run: str, root: Path) -> Fact:
    make = partial(Fact, "kept-production-run")
    sentence = "today's production step of 12 layers at T 2048 fits in 6 GiB, in a kept run"
    if not run:
        return make(sentence, None, (), "no run was named")
    try:
        folder = Store(root).find(run)
    except ValueError as error:
        return make(sentence, None, (), str(error))
    rows: list[dict[str, Any]] = read_json(folder / "verdicts.json", [])
    fits = [r for r in rows if "production step of 12 layers at T 2048" in r["claim"]]
    if not fits or fits[0]["verdict"] == "INCONCLUSIVE":
        return make(sentence, None, (f"run:{folder.name}",), "not measured there")
    holds = fits[0]["verdict"] == "PASS"
    return make(sentence, holds, (f"run:{folder.name}",), fits[0]["claim"])
