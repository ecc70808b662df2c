"""Figures that the case study reported, as it reported them; its mistakes are kept.

The case study is a public PyTorch implementation of NSA and five reports on it of August 2025.
Memory is of one training step, fp32, batch 1, 5 layers of a model of width 768, PyTorch 2.5.1, on
an A100; the reports mix MB and MiB, and the allocator's figures are MiB.
"""

import math
from dataclasses import dataclass

# T -> MiB: "memory scales with O(S^2)", said the report beside it.
MEMORY_MIB = {128: 483.0, 256: 1425.0, 512: 5164.5, 1024: 12019.8, 2048: 20556.9}


# The same report's estimator: MiB, and MiB a token squared.
ESTIMATOR = (145.2, 0.005115)


def estimate_mib(tokens, estimator=ESTIMATOR):
    """What it gives, for a number or an array of tokens."""
    constant, slope = estimator
    return constant + slope * tokens**2


ESTIMATE_MIB = {tokens: estimate_mib(tokens) for tokens in MEMORY_MIB}

# "All backends use identical memory", at T 2048: the runs were one program under four names.
IDENTICAL_MIB = {"masked": 20451.9, "packed": 20451.9, "gather": 20451.9}

# What the reports projected for one step of the 12-layer production model at T 2048, batch 1.
PRODUCTION_GB = {"forward": 50.48, "backward": 151.23}

# Training speed as reported on A100s, at T 1024 on an RTX 3090: (T, tokens/s, what was said of it).
TOKENS_PER_S = (
    (128, 153.0, "batch 8"),
    (256, 66.0, "its own 19.3 s a step make 13.2"),
    (1024, 20.0, "the step-5 hang"),
    (2048, 9.0, "12 layers, 224 to 233 s a step"),
    (2048, 785.0, "packed, two A100"),
    (2048, 9400.0, "after its fix, with wrong gradients"),
)
TARGET_TOKENS_PER_S = (300.0, 800.0)

# The estimates it published beside that table, MB, and the peak of its 12-layer run at T 2048, MiB.
PUBLISHED_ESTIMATE_MB = {128: 229.0, 512: 1486.0, 1024: 5508.0, 2048: 21597.0}
PRODUCTION_PEAK_MIB = 49023.0
# (layers, T) -> MiB: that peak and those of its memory table.
PEAKS_MIB = {(5, tokens): mib for tokens, mib in MEMORY_MIB.items()}
PEAKS_MIB[12, 2048] = PRODUCTION_PEAK_MIB
# 5 layers at T 2048 in four tables of two reports of one day, MB: (all branches, one forced). The
# second report names its allocator, expandable segments; the first names none.
FOUR_PEAKS_MB = {"first": (20556.9, 20451.9), "second": (20443.0, 20338.0)}
# The same at T 512, all branches and one forced; and both reports' tables of all branches, MB.
FORCED_MB = {512: (5164.5, 5138.0)}
TABLES_MB = {512: (5164.5, 5111.0), 1024: (12019.8, 11917.0), 2048: (20556.9, 20443.0)}

# Its comparison of backends, 5 layers at T 2048: (MB, seconds); None where it was not completed.
BACKENDS_2048 = {
    "masked": (20451.9, 86.32),
    "packed": (20451.9, 86.26),
    "gather": (20451.9, 85.40),
    "sliding masked": (20451.9, 86.37),
    "parity": None,
}

# T 256, batch 1: layers -> (forward, backward, total) seconds; and what safe packing cost, percent.
LAYER_SCALING_S = {
    1: (1.388, 0.705, 2.093),
    2: (1.719, 1.330, 3.049),
    4: (3.547, 2.668, 6.215),
    12: (11.324, 8.019, 19.343),
}
SAFE_PACKING_PERCENT = {1: 0.9, 2: -1.0, 4: -0.8}

# "Deterministic, always step 5": the step at which each variant was last heard of.
STEPS_REACHED = {
    "default": 1,
    "no aux stats": 5,
    "conservative": 1,
    "two-step trace": 0,
    "launch blocking": 0,
}

# What was called a hang, and after how long: (what, layers, T, batch, deadline in seconds).
DEADLINES = (
    ("CPU test", 12, 512, 2, 30.0),
    ("GPU evidence", 12, 2048, 2, 60.0),
    ("watchdog", 12, 2048, 1, 180.0),
)

# The longest limit of a run, seconds: "timeout after 5 minutes".
LONGEST_LIMIT_S = 300.0
# That CPU test run to its end for this project, on two cores: it passed.
CPU_TEST_S = 136.0
# What the 3090 report saw of the process that "hung", in GB, in use and there; CPU and GPU, shares.
USED_GB = (2.4, 24.0)
BUSY = {"CPU": 1.04, "GPU": 0.20}
# Its last console line, read as a hang by one report and as "no hang" by another: the step in it.
LAST_LINE = {"hang": 5, "no hang": 5}
# The steps that stdout and the heartbeat file name last in a rerun of that code of seven steps,
# with aux stats and without.
RERUN = {"with": {"stdout": 5, "heartbeat": 7}, "without": {"stdout": 5, "heartbeat": 7}}

# Of 27 configurations "passed", those that its own tables do not say so of.
UNFINISHED = {"parity": "incomplete", "10 layers, T 2048": "started", "soak": "timed out"}
# Records that its reports keep of what they name as causes.
RECORDS = {
    "source hash": 0,
    "GPU processes": 0,
    "GPU without processes": 0,
    "clocks": 0,
    "strict fallback": 0,
    "strict fallback failed": 0,
}
# Counted in that code, one layer of the smoke design at T 256: autograd nodes by arm.
BRANCH_NODES = {"win": 40_851, "sel": 40_851, "cmp": 40_851}
BACKEND_NODES = {"masked": 45_463, "packed": 45_463, "parity": 45_463}
# Tokens/s: 12 layers under FSDP, "below 1"; batch 2 and 4 on two A100s.
FSDP_TOKENS_PER_S = 1.0
BATCH_TOKENS_PER_S = {2: 39.0, 4: 33.0}
# Ranks on which its bucket hook raised, of two, run for this project under PyTorch 2.5.1.
BUCKET_HOOK_RAISED = 2
# Largest error of its gather, packed, parity and window paths against dense causal attention, and
# what its parity tests allowed.
PARITY_ERROR, PARITY_LIMIT = 3.6, 1e-5
# Gradients that its example calls missing, and the names of an attention's parameters in that code.
NAMED_MISSING = ("gate_mlp.weight", "q_proj")
PARAMETERS = (
    "W_Q", "W_K_sel", "W_V_sel", "W_K_win", "W_V_win", "W_K_cmp", "W_V_cmp", "out",
    "gate.fc1", "gate.fc2",
)  # fmt: skip

# Gradient arrival lists: of a run that passed, and of the report's own example.
ARRIVED = {"archive": (195, 0), "example": (190, 5)}
# A 50,000-step run said to be of the 12-layer model at T 128, and a laptop's CPU beside an A100.
TOY_RUN_TOKENS_PER_S = 405.0
LAPTOP_TOKENS_PER_S, A100_TOKENS_PER_S = 1100.0, 153.0
A100_GIB = 79.6

# The lower and upper bound of microseconds an operation over all nine timings below.
BAND_US = (9.5, 14.5)

# ATen operations of one layer's forward and backward in the case study's code, batch 1, by design
# and T, as counted in it.
PER_LAYER = {
    ("production", 128): 79_494,
    ("production", 256): 158_502,
    ("production", 512): 316_518,
    ("production", 1024): 648_542,
    ("production", 2048): 1_441_330,
    ("smoke", 1024): 725_490,
}


# Figures above that no report has: that code was run for this project, and no record of it is here.
# What rests on one of them alone is decided by nothing.
STATED = frozenset(
    {
        "CPU_TEST_S", "RERUN", "BRANCH_NODES", "BACKEND_NODES", "BUCKET_HOOK_RAISED",
        "PARITY_ERROR", "PER_LAYER",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """A step's seconds as the case study reported them."""

    gpu: str
    design: str
    layers: int
    tokens: int
    seconds: float
    said: str

    @property
    def operations(self) -> int:
        return self.layers * PER_LAYER[self.design, self.tokens]

    @property
    def microseconds(self) -> float:
        """Per operation."""
        return 1e6 * self.seconds / self.operations

    def __str__(self) -> str:
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        return f"{layers}, T {self.tokens}, {self.gpu}"


TIMINGS = (
    Timing("A100", "production", 1, 256, 2.093, "layer scaling"),
    Timing("A100", "production", 2, 256, 3.049, "layer scaling"),
    Timing("A100", "production", 4, 256, 6.215, "layer scaling"),
    Timing("A100", "production", 12, 256, 19.343, "layer scaling, 'about 66 tokens/s'"),
    Timing("A100", "production", 5, 512, 22.55, "backend runs"),
    Timing("A100", "production", 5, 1024, 46.14, "backend runs"),
    Timing("A100", "production", 5, 2048, 86.3, "backend runs, 'all backends alike'"),
    Timing("A100", "production", 12, 2048, 224.4, "production run"),
    Timing("RTX 3090", "smoke", 6, 1024, 51.2, "the step-5 hang, from its 20 tokens/s"),
)
# What else is known of the same operations, outliers included.
OTHER_TIMINGS = (
    Timing("A100", "production", 5, 512, 8.85, "another report, perhaps of one direction alone"),
    Timing("A100", "production", 5, 2048, 93.6, "another report of that day"),
    Timing("A100", "production", 12, 2048, 233.0, "production test"),
    Timing("2 CPU cores", "production", 1, 512, 3.39, "that code run for this project"),
    Timing("2 CPU cores", "production", 1, 2048, 18.2, "that code run for this project"),
    Timing("2 CPU cores", "smoke", 6, 1024, 27.0, "that code run for this project"),
)
ALL_TIMINGS = TIMINGS + OTHER_TIMINGS


def held_out_us(each) -> list[float]:
    """For each of several microseconds an operation, the constant that all others give: their
    geometric mean."""
    logs = [math.log(us) for us in each]
    return [math.exp((sum(logs) - log) / (len(logs) - 1)) for log in logs]
