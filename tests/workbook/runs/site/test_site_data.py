import json

import pytest
from site_runs import table

from workbook.runs.files import read_json, write_json
from workbook.runs.site import data


def run_of(*rows):
    return {"rows": json.loads(json.dumps(data.columns(table(*rows))))}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "runs" / "2026-11-21" / "02_tiny-12345678"
    folder.mkdir(parents=True)
    started = "2026-11-21T10:00:00+00:00"
    record = {"notebook": "02_tiny", "status": "ok", "started": started, "question": "Does it?"}
    write_json(folder / "record.json", record)
    write_json(folder / "environment.json", {"torch": "2.13.0", "gpus": [{"name": "H200"}]})
    table((512, 1.0, {})).to_csv(folder / "metrics.csv", index=False)
    return folder


def collected(folder):
    return data.collect(folder, folder.parents[1])


def test_rows_come_back_as_they_were_stored():
    run = run_of((512, 1.5, {"queries": "random"}), (1024, None, {"queries": "random"}))
    first, second = data.rows_of(run, "latency")
    assert (first["x_value"], first["median"], first["queries"]) == (512, 1.5, "random")
    assert second["median"] is None and second["device"] == "NVIDIA H200"
    assert data.rows_of(run, "peak_memory") == []


def test_rows_of_one_run_are_told_apart_by_the_fewest_settings():
    both = [(512, 1.0, {"queries": q, "heads": h}) for q in ("random", "alike") for h in (4, 64)]
    assert sorted(run_of(*both)["rows"]["by"]) == ["heads", "queries"]
    alone = [(512, 1.0, {"queries": q, "heads": 4}) for q in ("random", "alike")]
    assert run_of(*alone)["rows"]["by"] == ["queries"]
    assert run_of((512, 1.0, {"heads": 4}), (1024, 2.0, {"heads": 64}))["rows"]["by"] == []


def test_what_was_found_tells_no_rows_apart():
    measured = [
        {"outcome": "ok", "tflops": 1.5, "trial": "0123456789ab", "heads": 4},
        {"outcome": "OOM", "tflops": 2.5, "trial": "ba9876543210", "heads": 8},
    ]
    assert run_of(*((512, 1.0, config) for config in measured))["rows"]["by"] == ["heads"]


def test_a_setting_called_as_a_column_does_not_replace_it():
    run = run_of((512, 1.0, {"device": "cuda"}))
    assert data.rows_of(run, "latency")[0]["device"] == "NVIDIA H200"


def test_true_and_one_are_two_values():
    run = run_of((512, 1.0, {"compile": True}), (512, 2.0, {"compile": 1}))
    assert [row["compile"] for row in data.rows_of(run, "latency")] == [True, 1]
    assert run["rows"]["columns"]["compile"]["values"] == [True, 1]


def test_a_run_that_beats_is_not_new_and_is_lost_when_it_stops(folder):
    record = read_json(folder / "record.json")
    beating = record | {"status": "running", "heartbeat": "2999-01-01T00:00:00+00:00"}
    write_json(folder / "record.json", beating)
    before = collected(folder)
    assert before["status"] == "running" and before["device"] == ["NVIDIA H200"]
    write_json(folder / "record.json", beating | {"heartbeat": "2999-01-01T00:00:15+00:00"})
    assert collected(folder) == before
    write_json(folder / "record.json", beating | {"heartbeat": "2026-11-21T10:00:00+00:00"})
    assert collected(folder) == before | {"status": "lost"}


@pytest.mark.parametrize(
    "file", ["record.json", "environment.json", "verdicts.json", "metrics.csv", "parameters.yaml"]
)
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b'"text"', b"[1, {}]"])
def test_a_file_damaged_by_hand_is_named_and_the_rest_is_read(folder, file, content):
    (folder / file).write_bytes(content)
    found = collected(folder)
    assert found["run"] == "2026-11-21/02_tiny-12345678" and found["notebook"] == "02_tiny"
    named = [line.partition(":")[0] for line in found["damaged"]]
    # a list is what verdicts.json should be; what in it is no verdict is left out
    assert named == [file] or (file, content) == ("verdicts.json", b"[1, {}]")


def test_a_run_whose_parameters_ask_has_their_question(folder):
    (folder / "parameters.yaml").write_text("question: Does bf16 learn what fp32 learns?\n")
    assert collected(folder)["question"] == "Does bf16 learn what fp32 learns?"
