"""lm_eval's command scores a saved model by its path alone."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

from hf_clients import saved

TASK = """task: next_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: "{{{{a}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.mark.clients
@pytest.mark.slow
@pytest.mark.registered
@pytest.mark.processes
def test_the_command_scores_a_folder_alike_by_one_and_by_four(tmp_path):
    folder = saved(tmp_path / "model")
    rows = [
        {"q": "one two", "c": [" three", " four"], "a": 0},
        {"q": "red green", "c": [" blue", " a fish"], "a": 1},
        {"q": "a", "c": [" b", " longer one"], "a": 0},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "task.yaml").write_text(TASK.format(data=data))
    found = []
    for batch in ("1", "4"):
        out = tmp_path / batch
        done = subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-m", "lm_eval", "--model", "hf"),
                *("--model_args", f"pretrained={folder},dtype=float32", "--tasks", "next_word"),
                *("--include_path", str(tmp_path / "tasks"), "--device", "cpu"),
                *("--batch_size", batch, "--output_path", str(out), "--log_samples"),
            ],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (samples,) = out.rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        found.append([[float(x[0][0]) for x in line["resps"]] for line in lines])
    assert found[0] == [pytest.approx(row, abs=1e-4) for row in found[1]]
    assert len({x for row in found[0] for x in row}) > 3
