"""Healthy programs that compute for a long time between two steps."""

import functools
import gc
import hashlib
import itertools
import lzma
import operator
import os
import random
import re
from collections import Counter

import torch
from torch import nn

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.common import sized, spend
from nsa.experiments.selfcheck.programs.registry import program


@program("healthy", at=2, forms=3, seconds=(14, 14))
def evaluation_in_python(form):
    """A metric in plain Python: BLEU (0), word errors (1), pairwise AUC (2)."""
    (bleu, word_errors, pairwise_auc)[form]()


def bleu():
    words, matched = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat"], 0
    for k in spend(14):
        guess, truth = (random.Random(k + j).choices(words, k=30) for j in range(2))
        for n in range(1, 5):
            mine, theirs = (Counter(tuple(s[j : j + n]) for j in range(30)) for s in (guess, truth))
            matched += (mine & theirs).total()
    return matched


def word_errors():
    wrong = 0
    for k in spend(14):
        guess, truth = (random.Random(k + j).choices("abcdef", k=40) for j in range(2))
        row = list(range(41))
        for i, letter in enumerate(guess):
            above, row = row, [i + 1]
            for j, other in enumerate(truth):
                row.append(min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1))
        wrong += row[-1]
    return wrong


def pairwise_auc():
    scores = [random.random() for _ in range(2000)]
    return sum(sum(scores[k % 2000] > other for other in scores) for k in spend(14))


@program("healthy", at=3, forms=3, seconds=(12, 20))
def metric_in_one_call(form):
    """Everything in one call into C, with the interpreter's lock held (0) or not (1, 2)."""
    if form == 0:
        sum(map(operator.mul, itertools.cycle((3, 1, 4)), range(sized(5e8))))
    elif form == 1:
        hashlib.pbkdf2_hmac("sha256", b"weights", b"salt", sized(8e7))
    else:
        lzma.compress(random.Random(0).randbytes(sized(3.8e7)), preset=9)


@program("healthy", at=2, seconds=(14, 16))
def garbage_collection(form):
    """The collector, called by hand on a large heap (0); a large cache dropped, again and again."""
    heap = [[k] for k in range(sized(4e6))]
    for _ in spend(14):
        if form == 0:
            gc.collect()
        else:
            heap = {k: {"tokens": [k, -k], "mask": (k,)} for k in range(sized(1e6))}
    heap.clear()


@program("healthy", at=1, seconds=(14, 14))
def building_tables(form):
    """An index over the corpus (0) or lists of samples (1), built before step 1."""
    index = {}
    for k in spend(14):
        if form == 0:
            for word in range(k, k + 500):
                index.setdefault(word * 7919 % 300_007, []).append(k & 127)
        else:
            index[k % 3] = [(f"{j:08}.jpg", j % 10, {"size": j}) for j in range(sized(1e6))]


@program("healthy", seconds=(14, 20))
def slow_constructor(form):
    """A dataset that parses its files (0) or waits for slow storage (1) in its constructor."""
    corpus = Corpus(form)
    return (loss for i, loss in common.training() if corpus.lines)


class Corpus:
    def __init__(self, form):
        self.lines = []
        for k in spend(14) if form == 0 else range(40):
            common.pause(0.5 * form)
            self.lines = [*self.lines[-100:], {"id": k, "text": str(k).split("0")}]


@program("healthy", seconds=(10, 40), load_sensitive=True)
def compile_cold_cache(form):
    """torch.compile that nobody has called before; form 1 meets three shapes."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(common.scratch())
    model, opt, (inputs, targets) = common.tiny()
    deep = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 64, 0.0) for _ in range(8)), model)
    backend = "inductor" if common.SCALE >= 1 else "eager"
    called = torch.compile(deep, backend=backend, dynamic=False if form else None)
    for i in range(6):
        rows = 8 - (i % 3 if form else 0)
        yield common.train_step(called, opt, (inputs[:rows], targets[:rows]))


@program("healthy", at=2, seconds=(12, 20))
def sorting_huge_lists(form):
    """A curriculum: four sorts of samples (0), one sort with a comparison in Python (1)."""
    if form == 0:
        samples = [("train", "en", random.random()) for _ in range(sized(5e6))]
        for column in range(4):
            sorted(samples, reverse=column % 2)
    else:
        lengths = [random.randrange(10**6) for _ in range(sized(6e6))]
        lengths.sort(key=functools.cmp_to_key(lambda a, b: (a % 997) - (b % 997)))


@program("healthy", at=1, forms=3, seconds=(12, 20))
def regex_over_text(form):
    """Cleaning a text: one search that backtracks (0), one findall (1), a sub that calls us (2)."""
    if form == 0:
        re.search(r"(x+x+)+y", "x" * (29 if common.SCALE >= 1 else 18))
    elif form == 1:
        re.findall(r"(?:\w+ )*\d", "some words " * int(7000 * common.SCALE**0.5))
    else:
        text = "the price of 3.14 apples, and some_more words! " * 10_000
        for _ in spend(14):
            re.sub(r"\w+", lambda found: found[0][::-1].title(), text)


@program("healthy", seconds=(14, 14))
def nested_backward(form):
    """Gradients of gradients within one step: a penalty (0), products with the Hessian (1)."""
    model, opt, batch = common.tiny()
    for i in range(6):
        for _ in spend(14) if i == 2 else range(1):
            inputs = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            if form == 0:
                (slope.norm(dim=1) - 1).square().mean().backward()
            else:
                torch.autograd.functional.hvp(lambda x: model(x).square().sum(), inputs, inputs)
        yield common.train_step(model, opt, batch)


@program("healthy", seconds=(14, 14))
def long_no_grad_loop(form):
    """An evaluation over many batches (0), text generated token by token (1)."""
    model, opt, batch = common.tiny()
    for i in range(6):
        yield common.train_step(model, opt, batch)
        if i == 3:
            generate(model, batch[0]) if form else validate(model, batch)


@torch.no_grad()
def validate(model, batch):
    return sum(float((model(batch[0]) - batch[1]).abs().mean()) for _ in spend(14))


@torch.inference_mode()
def generate(model, state):
    for k in spend(14):
        state = state.roll(1, dims=1) + 0.01 * model(state)
        state[:, k % 16] = state.argmax(1).float() / 16


class Smooth(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs, seconds):
        context.seconds = seconds
        return inputs.tanh()

    @staticmethod
    def backward(context, gradient):
        common.busy(context.seconds)
        return gradient, None


@program("healthy", seconds=(14, 14))
def python_backward(form):
    """Step 2 spends its time in a backward of the user's own (0), or in a hook on a gradient."""
    model, opt, batch = common.tiny()
    for i in range(6):
        seconds = 14 * (i == 2)
        if form == 0:
            called = lambda x, s=seconds: Smooth.apply(model(x), s)  # noqa: E731
        else:
            called = model
            hook = model[0].bias.register_hook(lambda g, s=seconds: g + 0 * common.busy(s))
        yield common.train_step(called, opt, batch)
        hook.remove() if form else None


@program("healthy", at=2, seconds=(12, 25))
def linear_algebra(form):
    """One long call: eigenvalues (0) or singular values (1) of a large matrix."""
    matrix = torch.randn(*(2 * [int((4000 if form else 5000) * common.SCALE ** (1 / 3))]))
    torch.linalg.svd(matrix) if form else torch.linalg.eigh(matrix + matrix.T)
