"""Memory from torch.empty as NaN, so that an element nobody wrote shows.

In a module of its own: torch.compile looks names up in the module of what it traces, and of several
conftest.py only one is known by that name.
"""

import torch
from torch.utils._device import _device_constructors


def poison(monkeypatch) -> None:
    """Replaces torch's makers of memory until the test ends."""
    # Cached when first asked for: it must name torch's own makers, which `made` calls.
    _device_constructors()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))
    plain = torch.Tensor.new_empty

    def new_empty(self, *size, dtype=None, device=None, **options):
        if type(self) not in (torch.Tensor, torch.nn.Parameter):
            return plain(self, *size, dtype=dtype, device=device, **options)
        # torch.compile cannot trace the method it knows once that is replaced; it can this call.
        return torch.empty(
            *size, dtype=dtype or self.dtype, device=device or self.device, **options
        )

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def _filled(make):
    """`make` with NaN in every float it returns."""

    def made(*args, **kwargs):
        out = make(*args, **kwargs)
        wide = out.is_floating_point() and out.element_size() > 1  # float8 cannot always be filled
        if wide and out.layout is torch.strided and not torch.compiler.is_compiling():
            with torch.no_grad():
                out.fill_(float("nan"))
        return out

    return made
