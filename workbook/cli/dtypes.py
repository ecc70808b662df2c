"""`nsa env dtypes`: dtypes of the numbers in a checkpoint or a preset."""

import json
from pathlib import Path

from workbook.cli.options import FAILED, GOOD, command


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, dtypes, "--runs", "--json", under="env")
    text = "a checkpoint (any .pt of tensors), a folder of them, a run (id or latest), or a preset"
    made.add_argument("what", metavar="CHECKPOINT|RUN|PRESET", help=text)


def dtypes(arguments) -> int:
    """Count elements and MiB by dtype of parameters, gradients, optimizer state and buffers, and
    flag mismatches. Exit code 1 if anything is flagged."""
    from nsa.model import presets
    from workbook.lab.measure import dtypes as measured

    what = arguments.what
    if what in presets.PRESETS and not Path(what).exists():
        report = measured.preset_report(presets.preset(what))
    else:
        report = measured.file_report(_place(what, arguments.runs))
    if arguments.json:
        print(json.dumps({"rows": report.rows, "mismatches": report.mismatches}, indent=2))
    else:
        print(report)
    return FAILED if report.mismatches else GOOD


def _place(what: str, runs: str) -> Path:
    """File or folder of that name, or of the run so named. ValueError if there is neither."""
    from nsa.model.presets import PRESETS
    from workbook.runs.store import Store

    if Path(what).exists():
        return Path(what)
    try:
        return Store(runs).find(what)
    except ValueError as error:
        raise ValueError(
            f"{what!r} is no file, no folder, no preset ({', '.join(PRESETS)}) and no run: {error}"
        ) from None
