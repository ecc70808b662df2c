"""Facts planted in text and asked for later: needle, multi-query recall, variable tracking.

A line has LINE bytes and replaces as many of the text. `#= KEYS word;` states that KEYS has the
value `word`, or, if the word is in capitals, that of another key. A question repeats the statement
of its key or, after a chain, is `#? KEYS word;` with the value at the chain's start. Lines are
bytes of text, so a model of bytes is trained on them and asked within its own language; in tokens
they are spelled, an id a byte, so that tasks are equally long.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.model.data import IGNORED, Batch, Data, Device, generator, with_successors
from nsa.spelling import choice

LINE, ANSWER = 16, slice(9, 13)  # bytes of a line, and where in it the value stands
PAIRS = 8  # facts of "recall"
HOPS = 2  # references of "tracking"
KINDS = ("needle", "recall", "tracking")
OWN_SEEDS = 2**32  # added to the seed, since the text's own generators have (seed, step)
DENSITY = 2048  # ids of a training row for each task in it
LEAST = 2 * PAIRS * LINE * 2  # ids of a row that holds any task


@dataclass(frozen=True)
class Planted:
    """Text with tasks planted in each row; stateless in the step, as all data.

    kind None: one task in each DENSITY ids, of all KINDS, anywhere, for training; every id is a
    target. A kind: one task a row with its questions at the end, whose answers alone are scored.
    """

    text: Data
    seed: int
    kind: str | None = None

    def __post_init__(self) -> None:
        choice("kind", self.kind, (None, *KINDS))

    @property
    def name(self) -> str:
        return f"{self.kind or 'tasks'} planted in {getattr(self.text, 'name', 'text')}"

    def record(self) -> dict[str, Any]:
        """The text's record, and how much was planted."""
        inner = self.text.record() if hasattr(self.text, "record") else {}
        return inner | {"planted": self.kind or KINDS, "density": DENSITY, "seed": self.seed}

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """Draw a batch. ValueError for rows that are too short to hold a task."""
        if tokens < LEAST:
            raise ValueError(f"tokens={tokens} do not hold a planted task; at least {LEAST} would")
        ids, after = self.text.batch(step, batch, tokens)
        rows = torch.cat((ids, after[:, -1:]), 1)
        spelling = np.array(getattr(self.text, "spelling", range(256)))  # ids of the bytes
        first = step * batch
        answers = [self._plant(row, first + index, spelling) for index, row in enumerate(rows)]
        if self.kind is None:
            return with_successors(rows, device)
        targets = torch.full_like(rows, IGNORED)
        for row, target, places in zip(rows, targets, answers, strict=True):
            target[places] = row[places]
        return rows[:, :-1].contiguous().to(device), targets[:, 1:].contiguous().to(device)

    def _plant(self, row: Tensor, number: int, spelling: np.ndarray) -> Tensor:
        """Write the lines into a row [T + 1]; return the places of the answers' ids."""
        random = generator(OWN_SEEDS + self.seed, number)
        slots = row.shape[0] // LINE
        count = max(1, row.shape[0] // DENSITY) if self.kind is None else 1
        kinds = torch.randint(len(KINDS), (count,), generator=random).tolist()
        tasks = [_lines(self.kind or KINDS[kind], random) for kind in kinds]
        free, answers = torch.randperm(slots, generator=random), []
        written = row.numpy()  # the same memory; a write costs a tenth of a tensor's
        for facts, questions in tasks:
            lines = facts + questions
            mine, free = free[: len(lines)].sort().values, free[len(lines) :]
            if self.kind is not None:  # the row's last lines, so that all of them are whole
                mine = torch.randperm(slots - len(questions), generator=random)[: len(facts)]
                last = torch.arange(slots - len(questions), slots)
                mine = torch.cat((mine.sort().values, last))
            for place, line in zip((mine * LINE).tolist(), lines, strict=True):
                written[place : place + LINE] = spelling[np.frombuffer(line, np.uint8)]
            asked = mine[len(facts) :, None] * LINE + torch.arange(ANSWER.start, ANSWER.stop)
            answers.append(asked.flatten())
        return torch.cat(answers)


def _lines(kind: str, random: torch.Generator) -> tuple[list[bytes], list[bytes]]:
    """The lines of a task: statements in order, and questions with their answers."""
    pairs = PAIRS if kind == "recall" else 1
    keys = _words(HOPS + 1 if kind == "tracking" else pairs, "A", random)
    values = _words(pairs, "a", random)
    if kind == "tracking":
        facts = [_line("=", *pair) for pair in zip(keys, [values[0], *keys], strict=False)]
        return facts, [_line("?", keys[-1], values[0])]
    facts = [_line("=", *pair) for pair in zip(keys, values, strict=True)]
    return facts, [facts[i] for i in torch.randperm(pairs, generator=random).tolist()]


def _line(sign: str, key: str, value: str) -> bytes:
    return f"\n#{sign} {key} {value};\n\n".encode()


def _words(count: int, first: str, random: torch.Generator) -> list[str]:
    letters = torch.randint(26, (count, 4), generator=random, dtype=torch.uint8) + ord(first)
    return [bytes(row).decode() for row in letters.tolist()]
