"""Do these arms differ, in what, and by how much? Run in turns, measured, judged by what was said.

A plan is a parameter file of notebook 08, one mapping; `nsa run ab -f FILE` runs it. What it does
not name is as in the notebook: name question, predicts, factors or arms, and expect in every plan.

    question: Does checkpointing cost time, and does it change what is learnt?
    predicts: No; a recomputed forward is a third more operations.  # in words, before it runs
    factors:                  # every combination is an arm; `nsa trial --factors` has the names
      checkpoint: ["", all]
    arms: {}                  # or arms by name, of which the first is the base, without factors:
                              #   plain: {}
                              #   conservative: {anomaly: true, deterministic: true}
    never: []                 # combinations that are no arms, as of nsa trial sweep
    cover: all                # or pairs: fewer arms, in which all pairs of values occur
    settings: {layers: 2}     # the same in every arm; of the training, or of another `subject`
    steps: 6                  # of every trial, of which the first `warmup` (2) are not timed
    repeats: 3                # trials of an arm, in turns: A B C, A B C, A B C
    count: false              # operations and autograd nodes of one more step
    oracles: []               # further ones that watch all steps (and cost time in all)
    deadline_s: 600.0         # of a trial
    budget_s: 0.0             # of all; 0: no limit. The same command goes on where it stopped
    expect:                   # rules; each is one claim, PASS, FAIL or INCONCLUSIVE
      - same_verdict
      - equal_loss: 0.0
      - cost: {factor: checkpoint, base: "", value: all, of: seconds, least: 1.1, most: 1.6}

What is measured of a trial, and so what `of:` may name:

    seconds        a step's median after warm-up, from idle device to idle device
    processor      seconds of the processor, all threads: steadier where others use a CPU's cores
    forward, backward, optimizer    seconds of those phases, in steps of their own; on a CPU those
                   of the processor
    allocated, reserved    MiB at a step's peak (a CPU has allocated only, in a step of its own)
    fragmentation  MiB, reserved less allocated at the peak
    growing        MiB at the peak that are neither weights, gradients nor optimizer state
    operations, nodes      of one step, ATen's and autograd's (count: true)
    startup        seconds from the start of the process to its first step

The rules. Those with a number compare arms that train the same: equal layers, dim, tokens, batch,
seed, data and so on. `where: {factor: value or list}` in any rule takes these arms alone. A
value that is an interval is PASS inside the stated bounds, FAIL outside, INCONCLUSIVE across.

    same_verdict                 every trial ends with the same kind of verdict
    verdict: PASS                that one; or {ARM: KIND, ...} where ARM is an arm's name, such as
                                 "checkpoint=all", or "*" for all others
    fault: {arm: ARM, says: TEXT}    the arm fails, and its error has this text
    different_programs           no two arms ran the same paths and operations; equal arms compare
                                 nothing, are called INVALID, and fail
    equal_loss: 1e-4             all steps' losses agree to so many nats; 0.0: bit for bit
    loss_within: 0.01            the last tenth of the losses agree to this share
    loss_apart: 0.01             they do not
    equal_gradients              those of one step after the last are the same, bit for bit
    equal: {of: allocated, within: 0.001}    no arm is further than this share from another
    differs: {of: reserved, by: 0.01}        some arms are further apart than this share
    cost: {of: seconds, factor: F, base: A, value: B, least: 1.0, most: 1.1}    B in units of A, all
                                 else equal; least or most may be missing, without both it is a
                                 number that nobody predicted, and no verdict. For named arms
                                 factor: arm, and base may be missing for the first
    linear_in: {factor: layers, of: seconds, r2: 0.99}    a line through the arms' medians: R2, the
                                 slope with its interval, and the furthest arm. A lower R2 is FAIL
                                 where the turns' spread does not explain it, else INCONCLUSIVE
    exponent_in: {factor: tokens, of: growing, least: 0.9, most: 1.1, start: 256}    y ~ x^p, from
                                 that value on, with p's interval
    rank_order: {of: seconds, factor: selected_backend, order: [packed, gather, masked]}    the
                                 least first; named before it is measured

Another `subject` measures what it can: its result() returns any of the names in
nsa.lab.measure.steps.MEASURED; seconds it has from its progress without that.
"""
