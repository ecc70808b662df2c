"""Choice of the next token: the most likely one, or one drawn from the distribution."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nsa.model.config import check_number, keep_int
from nsa.model.data import generator


@dataclass(frozen=True)
class Sampling:
    """Sampling options. Temperature 0 chooses the most likely token, the lower id in a tie.

    Above 0 the logits are divided by it, `top_k` keeps so many of the most likely tokens, and
    `top_p` the fewest whose probability reaches it (nucleus sampling, arXiv 1904.09751), counted
    among those that top_k leaves. The most likely token is always kept.

    Sequence i of a batch uses random numbers of (seed, i) alone, drawn on the CPU: with one seed it
    gets the same tokens on every device, with or without a CUDA graph, in any batch.

    Raises:
        TypeError: a value that is not a number.
        ValueError: values out of range or without effect.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1337

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, least=0.0)
        keep_int(self, "seed", 0)
        if self.top_k is not None:
            keep_int(self, "top_k")
        if self.top_p is not None:
            check_number("top_p", self.top_p, above=0.0)
            if self.top_p > 1.0:
                raise ValueError(f"top_p={self.top_p} must be at most 1, which keeps all tokens")
        given = [f"{n}={v}" for n in ("top_k", "top_p") if (v := getattr(self, n)) is not None]
        if self.temperature == 0.0 and given:
            raise ValueError(
                f"temperature=0 takes the most likely token, so that {', '.join(given)} would "
                "change nothing; leave it out, or take temperature=1"
            )

    def numbers(
        self, batch: int, steps: int, device: torch.device | str = "cpu"
    ) -> Float[Tensor, "STEPS B"]:
        """Uniform random numbers in [0, 1), fp64, for the next `steps` tokens."""
        if self.temperature == 0.0:
            return torch.zeros(steps, batch, dtype=torch.float64, device=device)
        columns = [
            torch.rand(steps, dtype=torch.float64, generator=generator(self.seed, row))
            for row in range(batch)
        ]
        return torch.stack(columns, dim=1).to(device)

    def choose(
        self, logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]
    ) -> Int64[Tensor, " B"]:
        """Next token of each sequence. The host never waits, so a CUDA graph can capture it."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1)
        # stable: of equal tokens the lower id comes first, as argmax has it
        ranked, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        # from the largest one, so that no temperature overflows
        likely = torch.softmax((ranked - ranked[:, :1]) / self.temperature, dim=-1)
        if self.top_k is not None:
            likely = likely[:, : self.top_k]
        if self.top_p is not None:
            reached = likely.cumsum(-1) - likely
            enough = self.top_p * likely.sum(-1, keepdim=True)
            likely = likely.masked_fill(reached >= enough, 0.0)
        up_to = likely.cumsum(-1)
        # u < 1 stays below the last one, but for rounding: a token of probability 0 is not drawn.
        index = (up_to <= uniform[:, None] * up_to[:, -1:]).sum(-1, keepdim=True)
        last = (likely > 0.0).sum(-1, keepdim=True) - 1
        return ids.gather(1, torch.minimum(index, last)).squeeze(1)
