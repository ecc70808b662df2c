"""Runs below a folder as the site reads them, made up, each with a notebook."""

import nbformat

from workbook.runs import metrics
from workbook.runs.files import write_json

FACTS = {"device": "NVIDIA H200", "torch": "2.13.0"}
SHAPE = {"heads": 64, "kv_heads": 4, "dim": 128, "dtype": "bf16"}


def table(*rows):
    """Latencies, each row's config and median beside T."""
    made = [
        {"operation": "nsa_attention", "metric": "latency", "unit": "ms", "x_name": "tokens",
         "x_value": tokens, "median": median, "config": config, "backend": "triton"}
        for tokens, median, config in rows
    ]  # fmt: skip
    return metrics.table([metrics.row(row, FACTS) for row in made])


def write_run(root, name, rows=(), cells=(), parameters="tokens: 512\n", **facts):
    """A run's folder: rows are (T, median, low, high) of each config."""
    folder = root / name
    folder.mkdir(parents=True)
    record = {"run_id": folder.name, "notebook": folder.name.partition("-")[0], "status": "ok",
              "started": f"{name[:10]}T10:00:00+00:00", "seconds": 3.0,
              "question": "Which one is fastest? And more."}  # fmt: skip
    write_json(folder / "record.json", record)
    write_json(folder / "verdicts.json", [{"verdict": "PASS", "claim": "it ran", "evidence": 1}])
    gpu = {"name": facts.pop("gpu", "NVIDIA H200"), "driver": "580"}
    facts = {"torch": "2.13.0", "triton": "3.7", "gpus": [gpu], "git": {"commit": "a" * 40}} | facts
    write_json(folder / "environment.json", facts)
    (folder / "parameters.yaml").write_text(parameters)
    if rows:
        made = table(*((tokens, median, config) for tokens, median, _, _, config in rows))
        made["q20"], made["q80"] = [row[2] for row in rows], [row[3] for row in rows]
        made["device"], made["mode"] = gpu["name"], "forward"
        both = made.assign(mode="backward")
        import pandas

        pandas.concat([made, both]).to_csv(folder / "metrics.csv", index=False)
    title = nbformat.v4.new_markdown_cell(f"# Run {folder.name}\n\nWith $\\frac{{1}}{{2}}$.")
    nbformat.write(nbformat.v4.new_notebook(cells=[title, *cells]), folder / "notebook.ipynb")
    return folder
