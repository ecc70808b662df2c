import re

import pytest
import torch

from nsa.model.data import IGNORED
from workbook.rooms.quality.planted import DENSITY, HOPS, KINDS, LEAST, LINE, PAIRS, Planted

FACT = re.compile(rb"\n#([=?]) ([A-Z]{4}) ([a-zA-Z]{4});\n\n")


class Dots:
    """Text of dots alone."""

    def batch(self, step, batch, tokens, device="cpu"):
        rows = torch.full((batch, tokens + 1), ord("."))
        return rows[:, :-1].clone(), rows[:, 1:].clone()


def lines(row):
    return [tuple(part.decode() for part in found) for found in FACT.findall(bytes(row.tolist()))]


def rows_of(ids, targets):
    """Rows of T + 1 bytes; what is not scored at the end is a dot."""
    last = targets[:, -1:].where(targets[:, -1:] != IGNORED, ord("\n"))
    return torch.cat((ids, last), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_questions_stand_at_the_end_and_their_answers_alone_are_scored(kind):
    ids, targets = Planted(Dots(), 7, kind).batch(0, 3, 1024)
    asked = PAIRS if kind == "recall" else 1
    for row, target in zip(rows_of(ids, targets), targets, strict=True):
        found = lines(row)
        *facts, _ = found if asked == 1 else (*found[:PAIRS], None)
        questions = found[-asked:]
        scored = bytes(target[target != IGNORED].tolist()).decode()
        assert scored == "".join(value for _, _, value in questions)
        values = {key: value for sign, key, value in facts if sign == "="}
        assert len(facts) == (HOPS + 1 if kind == "tracking" else asked)
        for sign, key, value in questions:
            assert sign == ("?" if kind == "tracking" else "=")
            while key in values:
                key = values[key]
            assert key == value
        assert int((target != IGNORED).nonzero()[0]) >= 1024 - asked * LINE


def test_a_training_row_holds_tasks_whose_facts_come_before_their_questions():
    ids, targets = Planted(Dots(), 7).batch(3, 4, 4 * DENSITY)
    assert (ids[:, 1:] == targets[:, :-1]).all()
    for row in torch.cat((ids, targets[:, -1:]), 1):
        found, values, asked = lines(row), {}, 0
        assert bytes(row.tolist()).count(b"#") == len(found) >= 4 * 2
        for sign, key, value in found:
            if sign == "?" or key in values:
                asked += 1
                while key in values:
                    key = values[key]
                assert key == value
            values.setdefault(key, value)
        assert asked >= 4


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_batch_depends_on_seed_and_step_alone(kind):
    def drawn(seed, step, batch=2):
        return Planted(Dots(), seed, kind).batch(step, batch, LEAST)[0]

    assert torch.equal(drawn(1, 5), drawn(1, 5))
    assert not torch.equal(drawn(1, 5), drawn(1, 6)) and not torch.equal(drawn(1, 5), drawn(2, 5))
    first, second = drawn(1, 5)
    assert not torch.equal(first, second)


def test_the_text_is_kept_where_nothing_is_planted():
    ids, _ = Planted(Dots(), 7, "needle").batch(0, 1, 1024)
    assert int((ids == ord(".")).sum()) == 1024 - 2 * LINE


class SpelledDots(Dots):
    """Dots as a tokenizer with ids of its own writes them: byte b is id 1000 - b."""

    spelling = tuple(1000 - byte for byte in range(256))

    def batch(self, *sizes):
        return tuple(1000 - ids for ids in super().batch(*sizes))


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_tokens_spell_the_same_lines_an_id_a_byte(kind):
    read, targets = Planted(Dots(), 7, kind).batch(2, 2, 1024)
    spelled, scored = Planted(SpelledDots(), 7, kind).batch(2, 2, 1024)
    assert torch.equal(1000 - spelled, read)
    assert torch.equal(torch.where(scored == IGNORED, IGNORED, 1000 - scored), targets)


def test_short_rows_and_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=rf"tokens=100 do not hold .*at least {LEAST}"):
        Planted(Dots(), 0).batch(0, 1, 100)
    with pytest.raises(ValueError, match="kind='copy' is unknown"):
        Planted(Dots(), 0, "copy")
