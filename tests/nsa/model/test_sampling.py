import pytest
import torch

from nsa.model.sampling import Sampling


def chosen(sampling, logits, draws=4000):
    """Count how often each id is drawn."""
    numbers = sampling.numbers(1, draws)
    found = sampling.choose(logits.expand(draws, -1), numbers[:, 0])
    return torch.bincount(found, minlength=len(logits)) / draws


def test_temperature_0_takes_the_most_likely_and_of_equal_ones_the_first():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert Sampling().choose(logits, torch.tensor([0.9, 0.9])).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_model_says(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0])
    wanted = torch.softmax(logits / temperature, 0)
    found = chosen(Sampling(temperature), logits)
    assert (found - wanted).abs().max() < 0.03  # four standard deviations


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [2, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [2]),  # 0.58 reaches it
        ({"top_p": 0.61}, [2, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2, "top_p": 0.72}, [2]),  # of the two 0.73 is the first's
        ({"top_k": 2, "top_p": 0.74}, [2, 4]),
    ],
)
def test_only_the_most_likely_are_drawn_from_in_their_proportion(how, kept):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0])
    likely = torch.softmax(logits, 0)
    wanted = torch.zeros(5)
    wanted[kept] = likely[kept] / likely[kept].sum()
    found = chosen(Sampling(1.0, **how), logits)
    assert set(found.nonzero()[:, 0].tolist()) <= set(kept)
    assert (found - wanted).abs().max() < 0.03


def test_top_p_keeps_the_fewest_where_some_reach_it_exactly():
    numbers = torch.tensor([[0.0, 0.4, 0.6, 0.99]], dtype=torch.float64)
    found = [int(Sampling(1.0, top_p=0.5).choose(torch.zeros(1, 4), n[None])) for n in numbers[0]]
    assert found == [0, 0, 1, 1]  # a quarter each: two reach a half


def test_a_sequence_draws_the_same_whatever_stands_beside_it():
    many, one = Sampling(1.0, seed=3).numbers(4, 50), Sampling(1.0, seed=3).numbers(1, 50)
    assert torch.equal(many[:, :1], one) and not torch.equal(many[:, 0], many[:, 1])
    assert not torch.equal(Sampling(1.0, seed=4).numbers(1, 50), one)
    assert many.min() >= 0 and many.max() < 1


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_no_number_draws_a_token_that_cannot_come(uniform):
    logits = torch.tensor([[float("-inf"), 1.0, 0.0, float("-inf"), -80.0]])
    number = torch.tensor([uniform], dtype=torch.float64)
    for how in ({}, {"top_k": 2}, {"top_p": 0.9}):
        token = int(Sampling(1.0, **how).choose(logits, number))
        assert token in ([1, 2] if how else [1, 2, 4])
    assert int(Sampling(1e-30).choose(logits, number)) == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 must be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 must be finite and greater than 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5 must be at most 1"),
        ({"top_k": 5, "top_p": 0.5}, "top_k=5, top_p=0.5 would change nothing"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_what_is_out_of_range_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**how)
