"""A program that compiles a model of transformers for many lengths with a padding mask.

One line of JSON: how many graphs, and the largest error of logits of tokens and of the loss.
"""

import json

import torch
from tiny_models import tiny
from torch._dynamo.testing import CompileCounterWithBackend
from traced_lengths import CONFIG, LENGTHS

from nsa.hf import NSAConfig, NSAForCausalLM


def padded(length, full):
    torch.manual_seed(length)
    ids = torch.randint(256, (3, length))
    mask = torch.ones_like(ids)
    if not full:
        mask[1, :7] = mask[2, -9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = NSAForCausalLM(NSAConfig.of(tiny(nsa=CONFIG, backend="auto")))
    counter, errors = CompileCounterWithBackend("eager"), []
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in LENGTHS:
        for full in (False, True):
            given = padded(length, full)
            found, wanted = compiled(**given), model(**given)
            apart = (found.logits - wanted.logits)[given["attention_mask"].bool()]
            errors += [float(apart.abs().max()), abs(float(found.loss - wanted.loss))]
    print(json.dumps({"graphs": counter.frame_count, "error": max(errors)}))
