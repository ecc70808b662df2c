"""Runs below a folder, made up, as a notebook that ended leaves them."""

import yaml

from workbook.runs import metrics, opening, store
from workbook.runs.files import write_json


def store_run(root, notebook, claims=(), rows=(), *, started="2026-11-01", **more):
    """A finished run. claims: (verdict, sentence) or (verdict, sentence, evidence); rows: of
    metrics.csv; more: torch, gpu, status, stop_reason, message, and `parameters`."""
    parameters = more.pop("parameters", {})
    gpu, torch = more.pop("gpu", "NVIDIA H200"), more.pop("torch", "2.11.0")
    folder = opening.create_folder(
        root, f"{notebook}-{abs(hash((started, torch))) % 10**8:08d}", started
    )
    ended = {"status": "ok", "stop_reason": "ok", "started": f"{started}T00:00:00+00:00"}
    write_json(folder / "record.json", {"notebook": notebook, "question": "Why?", **ended, **more})
    (folder / "parameters.yaml").write_text(yaml.safe_dump(parameters))
    facts = {"gpus": [{"name": gpu}] if gpu != "cpu" else [], "torch": torch}
    write_json(folder / "environment.json", {**facts, "git": {"commit": "c" * 40}})
    run = store.Run(folder, notebook)
    place = {"device" if "device" in metrics.COLUMNS else "gpu": gpu}
    run.add_rows([place | row for row in [{"operation": "o", "metric": "m", "median": 1.0}, *rows]])
    for verdict, sentence, *evidence in claims:
        run.verdict(sentence, verdict, *(evidence or [{"seen": 1}]))
    return folder
