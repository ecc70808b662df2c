"""Work of one rank in test_torchtitan.py: `python titan_entries.py FOLDER`, under its place."""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import titan_on_cpu
import torch
from places import ROOT
from tiny_models import tiny, tokens
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager

from nsa.recipes import torchtitan as recipe

BATCH, TOKENS = 4, 48


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()

    def get_vocab_size(self):
        return 256


class Rows(BaseDataLoader):
    """The same batches whatever the number of ranks; each takes its rows. Documents end at 20."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        documents: bool = True

    def __init__(self, config, *, dp_rank, dp_world_size, local_batch_size, **_):
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.step, self.documents = 0, config.documents

    def __iter__(self):
        while True:
            drawn = tokens(BATCH, TOKENS + 1, seed=self.step)[self.rows] % 7
            self.step += 1
            given = {"input": drawn[:, :-1]}
            if self.documents:
                place = torch.arange(TOKENS).expand(len(drawn), -1)
                given["positions"] = torch.where(place < 20, place, place - 20)
            yield given, drawn[:, 1:]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def config(folder, steps, **changes):
    """The recipe's config, with a tiny model and the batches above."""
    made = recipe.small()
    made.model_spec = recipe.spec(tiny())
    assert titan_on_cpu.utils.device_type == "cpu"
    made.dump_folder, made.hf_assets_path = str(folder), str(folder)
    made.tokenizer, made.dataloader = Bytes.Config(), Rows.Config()
    made.optimizer = recipe.default_adamw(lr=1e-2)
    training, checkpoint = made.training, made.checkpoint
    training.local_batch_size = BATCH // int(os.environ["WORLD_SIZE"])
    training.seq_len, training.steps = TOKENS, steps
    training.mixed_precision_param = "float32"
    made.lr_scheduler.warmup_steps, made.metrics.log_freq = 0, 1
    made.debug.seed = 11
    checkpoint.enable, checkpoint.interval = True, 4
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(made, section), field, value) if field else setattr(made, name, value)
    return made


def run(made):
    """The losses of training with that config, as they were logged, by step."""
    losses, trainer = {}, made.build()
    log = trainer.metrics_processor.log

    def noted(step, loss, *more, **options):
        losses[step] = float(loss)
        return log(step, loss, *more, **options)

    trainer.metrics_processor.log = noted
    try:
        trainer.train()
    finally:
        trainer.close()
    return losses


def first_loss(folder, **changes):
    """Loss, on the first batch, of the weights that the run has left in Hugging Face's layout."""
    weights = {"initial_load_path": str(folder / "checkpoint/step-5"), "initial_load_in_hf": True}
    changes |= {f"checkpoint__{name}": value for name, value in weights.items()}
    return run(config(folder / "again", 1, **changes))[1]


def declined(parsed):
    """Error of a model that is to be cut by tensor parallelism."""
    off = {f"{name}_enabled": False for name in ("cp", "pp", "ep")}
    cut = SimpleNamespace(tp=2, tp_enabled=True, **off)
    given = {"training": parsed.training, "parallelism": parsed.parallelism, "dump_folder": ""}
    given |= {"compile_config": parsed.compile, "ac_config": None}
    try:
        recipe.parallelize(None, parallel_dims=cut, **given)
    except ValueError as error:
        return str(error)


def main(folder):
    seen = {"losses": run(config(folder, 5, checkpoint__last_save_in_hf=True))}
    resumed = config(folder, 5, checkpoint__load_step=4, checkpoint__load_only=True)
    seen["resumed"] = run(resumed)
    seen["first loss"] = first_loss(folder, checkpoint__load_only=True)
    without = {"activation_checkpoint": None, "checkpoint__load_only": True}
    seen["no recomputation"] = first_loss(folder, **without)
    seen["bf16"] = first_loss(folder, training__mixed_precision_param="bfloat16", **without)
    whole = without | {"dataloader": Rows.Config(documents=False)}
    seen["one document"] = first_loss(folder, **whole)
    compiled = {"compile__enable": True, "compile__backend": "eager"}
    seen["compiled"] = first_loss(folder, compile__components=["model"], **compiled, **whole)
    seen["replicated"] = first_loss(
        folder,
        parallelism__data_parallel_replicate_degree=int(os.environ["WORLD_SIZE"]),
        parallelism__spmd_backend="partial_dtensor",
        **without,
    )
    place = ["--module", "nsa.recipes.torchtitan", "--config", "small"]
    parsed = ConfigManager().parse_args([*place, "--training.steps", "3"])
    seen["parsed"] = [parsed.training.steps, parsed.model_spec.flavor]
    seen["declined"] = declined(parsed)
    page = (ROOT / "docs/recipes.md").read_text()
    (folder / "mine.py").write_text(re.findall("```python\n(.*?)```", page, re.S)[-1])
    sys.path.append(str(folder))
    mine = ConfigManager().parse_args(["--module", "mine", "--config", "larger"])
    seen["mine"] = mine.model_spec.model.model.layers
    (folder / f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
