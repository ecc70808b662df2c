"""The figures of the last good run of each notebook, in one folder, each with its origin."""

from pathlib import Path

from nsa.workbook import environment
from nsa.workbook.files import read_json, write_atomically, write_json
from nsa.workbook.record import load


def publish_figures(folder: Path, root: Path, figures: Path) -> list[Path]:
    """Copy a run's PNG and SVG figures to `figures`, each beside a JSON that names the run.

    `folder` is the run's, below `root`. OSError where `figures` cannot be written.
    """
    sources = sorted(p for p in (folder / "figures").glob("*") if p.suffix in (".png", ".svg"))
    if not sources:
        return []
    facts = environment.provenance(read_json(folder / "environment.json", {}))
    record = load(folder)
    figures.mkdir(parents=True, exist_ok=True)
    copies = []
    for source in sources:
        copy = figures / f"{record['notebook']}--{source.name}"
        copies.append(write_atomically(copy, source.read_bytes()))
        origin = {
            "figure": source.stem,
            "notebook": record["notebook"],
            "run": folder.relative_to(root).as_posix(),
            "date": record["started"],
            **facts,
        }
        write_json(copy.with_suffix(".json"), origin)
    return copies
