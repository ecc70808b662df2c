"""Where entry points have moved: records of earlier runs name the old places and stay readable."""

MOVED = {
    "nsa.lab.exhibits.measure": "nsa.experiments.case_study.loop.measure",
    "nsa.lab.exhibits.state": "nsa.experiments.case_study.loop.measure",
    "nsa.lab.exhibits.subject": "nsa.experiments.case_study.loop.subject",
    "nsa.lab.settlement.settlement_trials": "nsa.experiments.case_study.settlement.trials",
    "nsa.lab.speed.bench": "nsa.experiments.comparison.trials",
    "nsa.experiments.comparison.bench": "nsa.experiments.comparison.trials",
    "nsa.lab.correctness.learning": "nsa.experiments.correctness.learning",
    "nsa.lab.correctness.correctness_oracle": "nsa.experiments.correctness.oracle",
    "nsa.lab.correctness.correctness_probe": "nsa.experiments.correctness.probe",
    "nsa.lab.memory.training_step": "nsa.experiments.memory.trials",
    "nsa.experiments.memory.child": "nsa.experiments.memory.trials",
    "nsa.lab.supervision.cost": "nsa.experiments.selfcheck.cost",
    **{
        f"nsa.lab.faults.{old}": f"nsa.experiments.selfcheck.faults.{new}"
        for new, olds in (
            ("stops", "ends waits pace"),
            ("wrong", "gradients growth"),
            ("devices", "ranks"),
        )
        for old in olds.split()
    },
    "nsa.lab.faults": "nsa.experiments.selfcheck.faults",
    "nsa.experiments.selfcheck.faults.slow": "nsa.experiments.selfcheck.faults.stops",
    "nsa.lab.throughput.throughput_trial": "nsa.experiments.throughput.child",
    "nsa.lab.throughput.loss_curves": "nsa.experiments.throughput.child",
    "nsa.experiments.throughput.loss_curves": "nsa.experiments.throughput.child",
    "nsa.lab.throughput.step_profile": "nsa.experiments.throughput.child",
    "nsa.experiments.throughput.step_profile": "nsa.experiments.throughput.child",
    "nsa.lab.tracing.tracing_child": "nsa.experiments.tracing.child",
    "nsa.lab.plans": "nsa.lab.search",
}


def current(entry: str) -> str:
    """ "module:function" as it is found today; an entry that never moved is returned as it is."""
    module, colon, name = entry.partition(":")
    for old, new in MOVED.items():
        if module == old or module.startswith(f"{old}."):
            return f"{new}{module.removeprefix(old)}{colon}{name}"
    return entry
