"""Figures that the case study reported, as it reported them; its mistakes are kept.

The case study is a public PyTorch implementation of NSA and five reports on it of August 2025.
Memory is of one training step, fp32, batch 1, 5 layers of a model of width 768, PyTorch 2.5.1, on
an A100; the reports mix MB and MiB, and the allocator's figures are MiB.
"""

# T -> MiB: "memory scales with O(S^2)", said the report beside it.
MEMORY_MIB = {128: 483.0, 256: 1425.0, 512: 5164.5, 1024: 12019.8, 2048: 20556.9}

# The same report's estimator: 145.2 + 0.005115 T^2.
ESTIMATE_MIB = {tokens: 145.2 + 0.005115 * tokens**2 for tokens in MEMORY_MIB}

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
