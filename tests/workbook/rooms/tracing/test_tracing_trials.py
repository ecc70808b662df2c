import json
from dataclasses import replace

import pytest
import torch
from tracing_rows import SETUP

from nsa.model.llama import LanguageModel
from nsa.model.parallel import SINGLE
from workbook.lab.search.planted import plant, planted, without_gradient
from workbook.rooms.tracing import child, trials
from workbook.rooms.tracing.trials import TRIALS, Setup, Trial, trace, trials_for

CONFIG = SETUP.spec(TRIALS[0]).config()
ALONE = Setup("cpu_test", tokens=64, batch=1, ranks=1, layers=1)


def alone(changes=None, **trial):
    """Trace of a trial by one process."""
    setup = replace(ALONE, changes=changes or {})
    return child.trace_one(setup, Trial("alone", kind="none", **trial), SINGLE)


def in_state(found, state, step=1, key="state"):
    return {r["parameter"] for r in found["arrivals"] if (r["step"], r[key]) == (step, state)}


def traced_by(entry, folder, *names, **options):
    entry = f"tracing_entries:{entry}"
    return trace(SETUP, trials_for(2, names), folder=folder, threads=1, entry=entry, **options)


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_one_branch_alone_lacks_what_the_layer_says_it_lacks(branch, phi):
    found = alone({"phi": phi}, branch=branch)
    expected = in_state(found, "missing", key="expected")
    assert in_state(found, "missing") == expected == set(found["unreachable"])
    learned = 2 * 5 if phi == "mlp" and branch != "cmp" else 0
    assert len(expected) == 8 + learned


def test_gates_without_gradient_are_expected_to_have_none():
    found = alone({"stopgrad_gates": True})
    gates = {f"blocks.0.attention.gate{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")}
    assert in_state(found, "missing") == gates == in_state(found, "missing", key="expected")


def test_every_gradient_of_a_clean_trial_arrives_in_every_step():
    found = alone(compared=True)
    for step in (1, 2, 3):
        assert not in_state(found, "missing", step) | in_state(found, "zero", step)
    assert len(found["losses"]) == 3 and found["unreachable"] == []
    assert {row["way"]: row["error"] for row in found["gradients"]} == {"rows": 0.0, "batch": 0.0}
    assert found["modules"][0]["module"] == "head" and found["buckets"] == []


@pytest.mark.parametrize("fault", ["detached", "gate x 0"])
def test_a_planted_fault_spoils_what_it_says_and_nothing_else(fault):
    found = alone(fault=fault)
    config = ALONE.config()
    expected = planted(fault, config, ranks=1)
    for step in (1, 2, 3):
        spoilt = in_state(found, "missing", step) | in_state(found, "zero", step)
        assert spoilt == set(expected.parameters) == in_state(found, expected.state, step)
    assert set(expected.parameters) < {name for name, _ in LanguageModel(config).named_parameters()}


def test_a_rank_branch_is_planted_on_the_last_rank_alone():
    assert planted("rank branch", CONFIG, 4).ranks == (3,)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    for rank, missing in ((0, 0), (1, 2)):
        model = LanguageModel(CONFIG)
        plant("rank branch", model, rank, 2)
        model(tokens, tokens)[1].backward()
        assert sum(p.grad is None for p in model.parameters()) == missing


def test_a_wrong_gradient_is_far_from_one_process_s():
    model = LanguageModel(CONFIG)
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    data = child.synthetic(SETUP.seed, 256)

    def rows():
        return child.beside_one_process(gradients, SETUP, TRIALS[0], data, SINGLE)

    assert all(row["error"] == 1.0 and row["parameter"] for row in rows())
    gradients["head.weight"].fill_(float("nan"))
    assert {(row["error"], row["parameter"]) for row in rows()} == {(float("inf"), "head.weight")}
    del gradients["head.weight"]
    assert {row["error"] for row in rows()} == {float("inf")}


def test_the_fingerprint_tells_weights_apart():
    model = LanguageModel(CONFIG)
    before = child.fingerprint(model)
    assert before == child.fingerprint(model)
    with torch.no_grad():
        model.head.weight[3, 5] += 1e-4
    assert before != child.fingerprint(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "cpu_tset"}, "the nearest is 'cpu_test'"),
        ({"batch": 3}, "batch=3 cannot be split over 2 rank"),
        ({"communication": "nccl"}, "needs GPUs; on a CPU 'gloo' would do"),
        ({"communication": "mpi"}, "backend='mpi' is unknown"),
        ({"bucket_mb": 0}, "bucket_mb=0 must be more than 0"),
        ({"precision": "fp16"}, "scales gradients"),
    ],
)
def test_a_setup_that_no_rank_could_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Setup(**{"preset": "cpu_test", "tokens": 64, "batch": 2, **changes})


def test_trials_are_chosen_by_name():
    assert trials_for(2) == TRIALS
    assert [trial.name for trial in trials_for(2, ["fsdp", "ddp"])] == ["fsdp", "ddp"]
    assert "rank branch" not in {trial.name for trial in trials_for(1)}
    with pytest.raises(ValueError, match="no trial 'dpd'; there are ddp, static graph"):
        trials_for(2, ["dpd"])


def test_unknown_faults_and_a_lone_rank_s_branch_are_refused():
    with pytest.raises(ValueError, match="fault='sabotage' is unknown"):
        planted("sabotage", CONFIG, 2)
    with pytest.raises(ValueError, match="needs at least 2 ranks"):
        planted("rank branch", CONFIG, 1)


def test_no_parameter_of_a_plain_model_is_excused():
    names = [name for name, _ in LanguageModel(CONFIG).named_parameters()]
    assert without_gradient(CONFIG, names) == set()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    chosen = trials_for(2, [t.name for t in TRIALS if t.name not in ("cmp alone", "slc alone")])
    return trace(SETUP, chosen, deadline_s=200, folder=folder, threads=1, progress=False), folder


@pytest.mark.processes
@pytest.mark.long  # notebook 05 runs these trials and judges these claims
def test_two_ranks_bear_out_every_claim_in_one_launch(traced):
    pytest.importorskip("pandas")
    from workbook.rooms.tracing import claims

    found, folder = traced
    assert found.launches == 1
    told = claims.all_claims(found)
    assert {claim.verdict for claim in told} == {"PASS"}, [str(claim) for claim in told]
    record = json.loads((folder / "launch-0" / "trial-0-rank-1.json").read_text())
    assert record["status"] == "ok" and record["result"]["losses"]


def test_a_shard_of_zeros_is_no_dead_gradient():
    def record(*states):
        rows = [{"step": 1, "parameter": f"p{n}", "state": s} for n, s in enumerate(states)]
        return {"result": {"arrivals": rows}}

    records = [record("arrived", "zero", "missing"), record("zero", "zero", "missing")]
    trials._judge_shards_together(records)
    for found in records:
        states = [row["state"] for row in found["result"]["arrivals"]]
        assert states == ["arrived", "zero", "missing"]


@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_raises_is_a_row_and_the_next_trial_gets_another_launch(tmp_path, capsys):
    found = traced_by("raise_on_rank_1", tmp_path, "ddp", "detached", deadline_s=120)
    assert found.launches == 2 and found.ended("detached")
    other, culprit = found.of("ddp")
    assert culprit["status"] == "error" and culprit["message"] == "ValueError: the planted mistake"
    assert "tracing_entries.py" in culprit["evidence"]
    assert culprit["first"] and not other["first"]
    assert other["status"] in ("ended", "error") and other["place"].startswith("trial 0: ddp")
    assert "error (ValueError: the planted mistake)" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.slow
def test_at_the_deadline_every_rank_says_where_it_stands(tmp_path):
    found = traced_by("stay_away_on_rank_0", tmp_path, "ddp", deadline_s=60)
    absent, waiting = found.of("ddp")
    assert absent["status"] == waiting["status"] == "timeout"
    assert "before step 1" in absent["place"] and "stay_away_on_rank_0" in absent["evidence"]
    assert waiting["place"] == "trial 0: ddp, before step 1"  # DDP compares the models' shapes
    assert (
        "DistributedDataParallel" in waiting["evidence"] or "distributed.py" in waiting["evidence"]
    )


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_that_never_meet_fail_every_trial_in_one_launch(tmp_path):
    found = traced_by("never_begin", tmp_path, "ddp", "fsdp", deadline_s=60)
    assert found.launches == 1
    for trial in ("ddp", "fsdp"):
        assert [row["status"] for row in found.of(trial)] == ["ended", "error"]
        assert found.of(trial)[1]["message"] == "ValueError: no meeting today"


@pytest.mark.gpus2
def test_two_gpus_bear_out_every_claim_under_nccl(tmp_path):
    pytest.importorskip("pandas")
    from workbook.rooms.tracing import claims

    setup = Setup("smoke", tokens=512, batch=2, device="cuda", communication="nccl")
    found = trace(setup, TRIALS, deadline_s=300, folder=tmp_path)
    told = claims.all_claims(found)
    assert "FAIL" not in {claim.verdict for claim in told}, [str(claim) for claim in told]


@pytest.mark.gpu
def test_one_gpu_is_traced_under_nccl(tmp_path):
    setup = Setup("smoke", tokens=512, batch=2, ranks=1, device="cuda", communication="nccl")
    chosen = trials_for(1, ["ddp", "fsdp", "detached"])
    found = trace(setup, chosen, deadline_s=300, folder=tmp_path)
    assert [row["status"] for row in found.outcomes] == ["ok"] * 3, found.outcomes
    assert all(row["error"] <= 1e-6 for row in found.gradients if row["way"] == "rows")
