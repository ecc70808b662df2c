"""Generation from prompts: prefill, then one token per sequence and step, with a cache."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nsa.model.cache import NSACache
from nsa.model.capture import CapturedStep
from nsa.model.config import check_int
from nsa.model.llama import LanguageModel
from nsa.model.sampling import Sampling

WARMUP = 2  # eager steps before one is captured


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Tensor],
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1337,
    end: int | None = None,
    chunk: int | None = None,
    backend: str = "auto",
    page: int | None = None,
    cuda_graph: bool | None = None,
    cache: NSACache | None = None,
) -> "Generation":
    """Generate up to `tokens` tokens for each prompt, as an iterator that yields step by step.

    Args:
        prompts: ids of each sequence, at least one each, or its bytes; they may differ in length.
        temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy decoding.
        end: id that ends a sequence; generation goes on until all sequences have ended.
        chunk: tokens per prefill chunk, which bounds the memory; one chunk by default.
        backend: decoding backend, see `nsa_decode`; a prompt in one chunk uses the model's own.
        page: tokens per page of the cache; None: the cache is contiguous.
        cuda_graph: replay each step from a CUDA graph; by default on a CUDA device.
        cache: an empty cache to fill, or one whose sequences are continued; by default a new one of
            the required size.

    Raises:
        ValueError: inputs do not fit; nothing is computed and the cache is unchanged.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    check_int("tokens", tokens)
    if end is not None:
        check_int("end", end, 0)
    if chunk is not None:
        check_int("chunk", chunk)
    device = model.embed_tokens.weight.device
    graph = device.type == "cuda" and not model.config.strict
    if cuda_graph and not graph:
        why = "strict=True" if model.config.strict else f"a model on {str(device)!r}"
        raise ValueError(f"cuda_graph=True needs a CUDA device and no strict=True, got {why}")
    graph = graph if cuda_graph is None else cuda_graph
    ids, lengths = padded(prompts, model.config.vocab)
    if cache is None:
        capacity = ids.shape[1] + tokens
        check_limit(model, capacity)
        where = {"dtype": model.embed_tokens.weight.dtype, "device": device}
        cache = NSACache(model.config, len(prompts), capacity, page=page, backend=backend, **where)
    elif page is not None or backend != "auto":
        raise ValueError("page and backend are the cache's own; leave them out beside cache=")
    else:
        cache.check(model.config, torch.empty(len(prompts), 1, device=device))
        check_limit(model, cache.longest + ids.shape[1] + tokens)
    cache.reserve([length + tokens for length in lengths])
    return Generation(model, ids, lengths, tokens, sampling, end, chunk, graph, cache)


def padded(prompts: Sequence[Sequence[int] | Tensor], vocab: int) -> tuple[Tensor, list[int]]:
    """Prompts right-padded with zeros: ([B, T] int64 on the CPU, lengths)."""
    if isinstance(prompts, str | bytes) or not len(prompts):
        raise ValueError(f"prompts={prompts!r}: wanted is a list with the ids of each sequence")
    rows = []
    for number, prompt in enumerate(prompts):
        row = torch.as_tensor(list(prompt) if isinstance(prompt, bytes) else prompt).cpu()
        if row.dim() != 1 or not len(row):
            raise ValueError(
                f"prompt {number} has shape {list(row.shape)}; wanted are at least one id in a row"
            )
        if row.dtype not in (torch.int64, torch.int32, torch.uint8):
            raise ValueError(f"prompt {number} is {row.dtype}; ids are int64")
        if int(row.min()) < 0 or int(row.max()) >= vocab:
            raise ValueError(
                f"prompt {number} holds ids from {int(row.min())} to {int(row.max())}; "
                f"vocab={vocab} has 0 to {vocab - 1}"
            )
        rows.append(row.long())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def check_limit(model: LanguageModel, tokens: int) -> None:
    """Raise ValueError if `tokens` exceeds the model's max_tokens."""
    limit = model.config.max_tokens
    if limit is not None and tokens > limit:
        raise ValueError(
            f"prompt and new tokens are {tokens}, more than max_tokens={limit}; a shorter prompt "
            "or fewer tokens would do"
        )


class Generation:
    """Iterator that computes the new tokens step by step.

    Each step yields a list with the token of each sequence, None for one that has ended. `tokens`
    holds the tokens so far. `first_token_s` and `tokens_per_s` are known at the end: the time to
    the first tokens, and the rate of all later tokens of all sequences.
    """

    def __init__(
        self,
        model: LanguageModel,
        ids: Int64[Tensor, "B T"],
        lengths: list[int],
        count: int,
        sampling: Sampling,
        end: int | None,
        chunk: int | None,
        graph: bool,
        cache: NSACache,
    ) -> None:
        self.model, self.cache, self.sampling, self.end = model, cache, sampling, end
        self.count, self.prompt_lengths = count, lengths
        self.tokens: list[list[int]] = [[] for _ in lengths]
        self.first_token_s = self.total_s = float("nan")
        self._ids, self._chunk, self.cuda_graph = ids, chunk, graph
        device, batch = model.embed_tokens.weight.device, len(lengths)
        self._numbers = sampling.numbers(batch, count, device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._newest = torch.zeros(batch, dtype=torch.int64, device=device)
        # How many tokens of each sequence a step stores: 0 once it has ended.
        self._open = None if end is None else torch.ones(batch, dtype=torch.int32, device=device)
        stream = torch.cuda.Stream(device) if graph else None
        self._graph = CapturedStep(self._body, stream, WARMUP) if graph else None
        self._steps = self._run()

    def __iter__(self) -> Iterator[list[int | None]]:
        return self._steps

    def __next__(self) -> list[int | None]:
        return next(self._steps)

    def all(self) -> list[list[int]]:
        """Run to the end and return the new tokens of each sequence, its end token included."""
        for _ in self._steps:
            pass
        return self.tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first ones, of all sequences together, per second."""
        later = sum(len(own) - 1 for own in self.tokens)
        spent = self.total_s - self.first_token_s
        return later / spent if spent > 0 else float("nan")

    def record(self) -> dict[str, Any]:
        """Record for a run: sizes, times, and the cache's record. Waits for the device."""
        device = self.model.embed_tokens.weight.device
        return {
            "prompt_tokens": self.prompt_lengths,
            "new_tokens": [len(own) for own in self.tokens],
            "first_token_ms": 1e3 * self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cuda_graph": self.cuda_graph,
            "sampling": vars(self.sampling),
            "cache": self.cache.record(),
        }

    def _run(self) -> Iterator[list[int | None]]:
        try:
            yield from self._generated()
        finally:
            if self._graph is not None:  # it holds this object, and so the cache
                self._graph.release()
                self._graph = None

    @torch.no_grad()
    def _generated(self) -> Iterator[list[int | None]]:
        started = time.perf_counter()
        self._take(self._prefill())
        yield self._told(self._sent(), started)
        # On a GPU the next step is launched before the host waits for this one's tokens.
        waiting, ahead = deque(), 1 if self._newest.is_cuda else 0
        for _ in range(1, self.count):
            if self.ended:
                break
            self._decode()
            waiting.append(self._sent())
            if len(waiting) > ahead:
                yield self._told(waiting.popleft(), started)
        while waiting and not self.ended:
            yield self._told(waiting.popleft(), started)

    @property
    def ended(self) -> bool:
        """True if every sequence has reached its end token."""
        return self.end is not None and all(own and own[-1] == self.end for own in self.tokens)

    def _prefill(self) -> Float[Tensor, "B V"]:
        """Logits after the last token of each prompt."""
        lengths = torch.tensor(self.prompt_lengths, dtype=torch.int32).to(self._newest.device)
        longest, last = self._ids.shape[1], None
        for start in range(0, longest, self._chunk or longest):
            ids = self._ids[:, start : start + (self._chunk or longest)].to(self._newest.device)
            counts = [min(max(n - start, 0), ids.shape[1]) for n in self.prompt_lengths]
            x = self.model.read(ids, self.cache, counts)
            place = (lengths - 1 - start).long()
            index = place.clamp(0, ids.shape[1] - 1)[:, None, None].expand(-1, 1, x.shape[2])
            found = x.gather(1, index)
            # A shorter prompt had its last token in an earlier piece.
            last = found if last is None else torch.where((place >= 0)[:, None, None], found, last)
        return self.model.logits(last)[:, -1]

    def _decode(self) -> None:
        """Compute one more token of each sequence that has not ended."""
        self.cache.reserve(1)
        if self._graph is None:
            self._body()
        else:
            self._graph()
        self.cache.count(1)

    def _body(self) -> tuple[()]:
        """Device part of a step, which a CUDA graph replays."""
        x = self.model.step(self._newest[:, None], self.cache, self._open)
        self._take(self.model.logits(x)[:, -1])
        return ()

    def _take(self, logits: Float[Tensor, "B V"]) -> None:
        """Draw the next tokens in place, without the host."""
        uniform = self._numbers.index_select(0, self._step).squeeze(0)
        self._newest.copy_(self.sampling.choose(logits, uniform))
        if self._open is not None:
            self._open *= self._newest != self.end
        self._step += 1

    def _sent(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start an asynchronous copy of the newest tokens to the host."""
        if not self._newest.is_cuda:
            return self._newest.clone(), None
        there = torch.empty(self._newest.shape, dtype=torch.int64, pin_memory=True)
        there.copy_(self._newest, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return there, event

    def _told(self, sent: tuple[Tensor, torch.cuda.Event | None], started: float):
        ids, event = sent
        if event is not None:
            event.synchronize()
        step = []
        for own, token in zip(self.tokens, ids.tolist(), strict=True):
            over = self.end is not None and bool(own) and own[-1] == self.end
            step.append(None if over else token)
            if not over:
                own.append(token)
        self.total_s = time.perf_counter() - started
        if self.first_token_s != self.first_token_s:  # NaN: these are the first
            self.first_token_s = self.total_s
        return step
