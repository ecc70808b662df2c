import importlib.metadata
import json
import platform
import subprocess
import sys

import pytest

from workbook.runs import environment


def git(folder, *words):
    name = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *name, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("one\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


@pytest.mark.processes
def test_a_snapshot_is_json_and_names_the_installed_versions():
    found = json.loads(json.dumps(environment.snapshot(seed=7)))
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["seed"] == 7 and found["cpu_cores"] >= 1
    assert found["date"].endswith("+00:00")
    expected = {"gpus", "cuda", "triton", "flash_attn", "flash_attn_4", "git", "allocator"}
    assert expected <= set(found)


@pytest.mark.processes
def test_of_variables_only_those_are_kept_that_change_the_run_and_no_host_user_or_path(monkeypatch):
    given = {
        "CUDA_HOME": "/usr/local/cuda-12.8",
        "TORCH_LIST": "a=/home/someone/x:/opt/y",
        "SLURM_JOB_USER": "someone",
        "SLURM_JOB_NODELIST": "node17",
        "TORCH_HUB_TOKEN": "hush",
        "SLURM_JOB_ID": "42",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "EDITOR": "vi",
        "NSA_COMMIT": "0123abcd",
    }
    for name, value in (
        given | dict.fromkeys(environment.PROCESSES, "of this process alone")
    ).items():
        monkeypatch.setenv(name, value)
    found = environment.snapshot()
    kept = {"CUDA_HOME": "cuda-12.8", "TORCH_LIST": "a=<path>:<path>", "SLURM_JOB_ID": "42"}
    kept |= {"OMP_NUM_THREADS": "2", "NSA_COMMIT": "0123abcd"}
    assert kept.items() <= found["variables"].items() and "EDITOR" not in found["variables"]
    assert "of this process alone" not in found["variables"].values()
    assert found["allocator"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    text = json.dumps(found)
    for secret in ("someone", "node17", "hush", "/usr/", "/opt/", platform.node()):
        assert secret not in text


SMI = [["0", "GPU-aa", "NVIDIA H200", "143771", "9.0", "570.1"],
       ["1", "GPU-bb", "NVIDIA A100", "81920", "8.0", "570.1"]]  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H200", "NVIDIA A100"]),
        ("1", ["NVIDIA A100"]),
        ("1,0", ["NVIDIA A100", "NVIDIA H200"]),
        ("GPU-aa", ["NVIDIA H200"]),
        ("", []),
    ],
)
def test_gpus_are_those_that_the_process_may_use(visible, names):
    assert [gpu["name"] for gpu in environment.visible_gpus(SMI, visible)] == names


@pytest.mark.processes
def test_a_gpu_is_described_and_none_is_an_empty_list(monkeypatch):
    described = {"name": "NVIDIA H200", "memory_gib": 140.4, "compute_capability": "9.0"}
    assert environment.visible_gpus(SMI, None)[0] == described | {"driver": "570.1"}
    assert environment.visible_gpus([], None) == []
    monkeypatch.setenv("PATH", "/nonexistent")
    environment.gpus.cache_clear()
    try:
        assert environment.gpus() == []
    finally:
        environment.gpus.cache_clear()


@pytest.mark.processes
def test_a_repository_is_clean_with_results_and_each_change_of_source_has_a_hash(repository):
    for name in ("runs/x/record.json", "figures/a.png"):
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text("1")
    found = environment.git_state(repository)
    assert len(found["commit"]) == 40
    assert found["dirty"] is False and found["dirty_hash"] is None
    hashes = set()
    (repository / "nsa").mkdir()
    new = "nsa/b.py"
    for name, content in (("a.py", "two\n"), ("a.py", "three\n"), (new, "x"), (new, "y")):
        (repository / name).write_text(content)
        found = environment.git_state(repository)
        assert found["dirty"]
        hashes.add(found["dirty_hash"])
    assert len(hashes) == 4


@pytest.mark.processes
def test_outside_a_repository_git_is_null_unless_the_commit_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("NSA_COMMIT", raising=False)
    assert environment.git_state(tmp_path) is None
    monkeypatch.setenv("NSA_COMMIT", "abc123")
    found = environment.git_state(tmp_path)
    assert found == {"commit": "abc123", "dirty": None, "dirty_hash": None}


def test_a_row_of_metrics_names_versions_and_a_dirty_commit():
    facts = {"gpus": [{"name": "NVIDIA H200"}], "torch": "2.13.0", "triton": None}
    facts["git"] = {"commit": "0123456789abcdef", "dirty": True}
    expected = {"torch": "2.13.0", "triton": ""}
    assert environment.provenance(facts) == expected | {"commit": "0123456789ab+dirty"}
