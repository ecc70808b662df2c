"""Which lesson tells which mutant from attention, and which mutants no lesson can tell.

(lesson, backend, T): the backend is one that runs the mutated line. Those that hold T x T tensors
or take one token at a time learn at a smaller T.
"""

LONG, DENSE, ONE_BY_ONE = 2048, 512, 64

TELLS = {
    "one-query-causal": ("window", "sequential", ONE_BY_ONE),
    "heads-as-time": ("window", "sequential", ONE_BY_ONE),
    "window-leak": ("window", "sequential", ONE_BY_ONE),
    "sequential-window-off-by-one": ("window", "sequential", ONE_BY_ONE),
    "inverted-mask": ("window", "sdpa", DENSE),
    "window-off-by-one": ("window", "masked", DENSE),
    "chunked-window-off-by-one": ("window", "gather", LONG),
    "kernel-window-off-by-one": ("window", "triton", LONG),
    "current-block-dropped": ("blocks", "gather", LONG),
    "chunked-positions-restart": ("blocks", "gather", LONG),
    "kernel-forgets-the-first-blocks": ("blocks", "triton", LONG),
    "equation-9-wrong-sign": ("selection", "gather", LONG),
    "equation-9-wrong-sign-in-the-band": ("selection", "gather", LONG),
    "chunked-scores-see-the-future": ("selection", "gather", LONG),
    "compressed-block-seen-too-early": ("compressed", "masked", DENSE),
    "late-binding-checkpoint": ("recall", "triton", LONG),
}

UNTOLD = {
    "scores-see-the-future": "no model runs this line: it is the reference's own selection",
    "heads-select-alone": "no model runs this line: it is the reference's own selection",
    "kernel-scores-another-group": "one group still scores with its own heads and finds the answer",
    "kernel-gate-gradient-of-another-branch": "gates that learn nothing stay open",
    "kernel-gradient-overwritten": "the keys learn to meet queries that learn less",
    "kernel-base-not-gated": "a branch that is always open is one that the task can live with",
}
