"""The exhibit's language model: embedding, blocks of attention and MLP, norm, untied head."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsa.experiments.case_study.loop.attention import ATTEND, Projected
from nsa.experiments.case_study.loop.design import Design
from nsa.reference.compress import compress
from nsa.reference.rotary import rotary_tables, rotate

BRANCHES = ("cmp", "slc", "win")


class Gate(nn.Module):
    """Mean query of a group -> three weights that sum to 1."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(head_dim, head_dim // 2)
        self.fc2 = nn.Linear(head_dim // 2, 3)
        nn.init.xavier_uniform_(self.fc2.weight, gain=0.1)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, q: Tensor) -> Tensor:
        """q [..., HKV, G, D] -> [..., HKV, 3]."""
        return self.fc2(F.silu(self.fc1(q.mean(-2)))).softmax(-1)


class Attention(nn.Module):
    """q, six K/V projections, the gate and the output projection; all but the gate bias-free."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        width = design.groups * design.head_dim
        self.q = nn.Linear(design.dim, design.dim, bias=False)
        self.k = nn.ModuleDict({b: nn.Linear(design.dim, width, bias=False) for b in BRANCHES})
        self.v = nn.ModuleDict({b: nn.Linear(design.dim, width, bias=False) for b in BRANCHES})
        self.gate = Gate(design.head_dim)
        self.out = nn.Linear(design.dim, design.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(ATTEND[self.design.path](self.project(x), self.gate, self.design))

    def project(self, x: Tensor) -> Projected:
        design = self.design
        angles = rotary_tables(x.shape[1], design.head_dim, device=x.device)
        q = rotate(self.q(x).unflatten(-1, (design.heads, -1)), *angles)
        k = {b: self.k[b](x).unflatten(-1, (design.groups, -1)) for b in BRANCHES}
        v = {b: self.v[b](x).unflatten(-1, (design.groups, -1)) for b in BRANCHES}
        k = {b: rotate(k[b], *angles) for b in BRANCHES}
        k["cmp"], v["cmp"] = (compress(y["cmp"], "mean", None, design.nsa) for y in (k, v))
        return Projected(q, k, v)


class Block(nn.Module):
    """Norm, attention, residual, norm, SiLU MLP of four times the width, residual."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(design.dim, eps=1e-6)
        self.attention = Attention(design)
        self.norm2 = nn.RMSNorm(design.dim, eps=1e-6)
        self.fc1 = nn.Linear(design.dim, 4 * design.dim, bias=False)
        self.fc2 = nn.Linear(4 * design.dim, design.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.silu(self.fc1(self.norm2(x))))


class LoopModel(nn.Module):
    """(logits, loss) of tokens [B, T] int64; the loss needs targets [B, T].

    checkpointing: recompute every block in the backward, the bound block, or with the defect
    `late_checkpoint` whichever the loop's name stands for by then, which is the last.
    """

    def __init__(self, design: Design, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.design, self.checkpointing = design, checkpointing
        self.embed = nn.Embedding(design.vocab, design.dim)
        self.blocks = nn.ModuleList(Block(design) for _ in range(design.layers))
        self.norm = nn.RMSNorm(design.dim, eps=1e-6)
        self.head = nn.Linear(design.dim, design.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None):
        x = self.embed(tokens)
        if not self.checkpointing:
            for block in self.blocks:
                x = block(x)
        elif self.design.has("late_checkpoint"):
            for block in self.blocks:
                x = checkpoint(lambda inp: block(inp), x, use_reentrant=False)  # noqa: B023
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(design: Design, seed: int = 1337, device: str | torch.device = "cpu", **options):
    """A LoopModel with weights from `seed`; in fp16 for the defect `fp16_adamw`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LoopModel(design, **options)
    return model.to(device, torch.float16 if design.has("fp16_adamw") else torch.float32)
