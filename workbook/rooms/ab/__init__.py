"""A/B comparison: do variants differ, and by how much? Run interleaved, judged by predictions.

A plan is a parameter file of notebook 08, one mapping; `nsa run ab -f FILE` runs it. Keys that are
absent default to the notebook's: give question, predicts, factors or variants, and expect in each
plan.

    question: Does checkpointing cost time, and does it change what is learnt?
    predicts: No; a recomputed forward is a third more operations.  # in words, before it runs
    factors:                  # every combination is a variant; `nsa trial --factors` lists names
      checkpoint: ["", all]
    variants: {}              # or variants by name, the first being the base, without factors:
                              #   plain: {}
                              #   conservative: {anomaly: true, deterministic: true}
    never: []                 # combinations to leave out, as in nsa trial sweep
    cover: all                # or pairs: fewer variants, in which all pairs of values occur
    settings: {layers: 2}     # the same in every variant; of the training, or of another `subject`
    steps: 6                  # of every trial; the first `warmup` (2) are not timed
    repeats: 3                # trials of a variant, interleaved: A B C, A B C, A B C
    count: false              # operations and autograd nodes of one additional step
    oracles: []               # additional ones that watch all steps (and slow all of them)
    deadline_s: 600.0         # of a trial
    budget_s: 0.0             # of all; 0: no limit. The same command resumes where it stopped
    expect:                   # rules; each is one claim, PASS, FAIL or INCONCLUSIVE
      - same_verdict
      - equal_loss: 0.0
      - cost: {factor: checkpoint, base: "", value: all, of: seconds, least: 1.1, most: 1.6}

Quantities measured in a trial, which `of:` may name:

    seconds        a step's median after warm-up, from idle device to idle device
    processor      seconds of the processor, all threads: steadier on a shared CPU
    forward, backward, optimizer    seconds of those phases, in separate steps; on a CPU, processor
                   seconds
    allocated, reserved    MiB at a step's peak (on a CPU only allocated, in a separate step)
    fragmentation  MiB, reserved minus allocated at the peak
    growing        MiB at the peak that are neither weights, gradients nor optimizer state
    operations, nodes      in one step, of ATen and autograd (count: true)
    startup        seconds from the start of the process to its first step

The rules. Rules with a number compare variants that train alike: equal layers, dim, tokens, batch,
seed, data and so on. `where: {factor: value or list}` restricts any rule to these variants. A
value with an interval is PASS inside the stated bounds, FAIL outside, INCONCLUSIVE across.

    same_verdict                 every trial ends with the same kind of verdict
    verdict: PASS                every trial ends so; or {VARIANT: KIND, ...} with a variant's
                                 name, such as "checkpoint=all", or "*" for all others
    fault: {variant: VARIANT, says: TEXT}    the variant fails, and its error contains this text
    different_programs           no two variants ran the same paths and operations; equal variants
                                 compare nothing, are called INVALID, and fail
    equal_loss: 1e-4             all steps' losses agree within this many nats; 0.0: bit for bit
    loss_within: 0.01            the last tenth of the losses agree within this fraction
    loss_apart: 0.01             they do not
    equal_gradients              gradients of one step after the last are equal, bit for bit
    equal: {of: allocated, within: 0.001}    no two variants differ by more than this fraction
    differs: {of: reserved, by: 0.01}        some variants differ by more than this fraction
    cost: {of: seconds, factor: F, base: A, value: B, least: 1.0, most: 1.1}    B in units of A, all
                                 else equal; least or most may be missing; without both, the number
                                 was not predicted and gets no verdict. For named variants use
                                 factor: variant; base defaults to the first
    linear_in: {factor: layers, of: seconds, r2: 0.99}    a line through the medians: R2, the slope
                                 with its interval, and the furthest variant. A lower R2 is FAIL if
                                 the repeats' spread does not explain it, else INCONCLUSIVE
    exponent_in: {factor: tokens, of: growing, least: 0.9, most: 1.1, start: 256}    y ~ x^p, for
                                 x >= start, with p's interval
    rank_order: {of: seconds, factor: selected_backend, order: [packed, gather, masked]}    in
                                 ascending order, named before it is measured

Another `subject` measures what it can: its result() returns any of the names in
workbook.lab.measure.steps.MEASURED; seconds come from its progress even without it.
"""
