"""Native Sparse Attention: definition, backends, decoding, and a small model.

The names below are imported when first used, so `import nsa` loads neither torch nor a backend.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "NSAConfig": "nsa.config",
    "nsa_attention": "nsa.attention.api",
    "nsa_varlen_func": "nsa.attention.varlen",
    "nsa_decode": "nsa.attention.decode",
    "ModelConfig": "nsa.model.config",
    "LanguageModel": "nsa.model.llama",
    "NSAAttention": "nsa.model.layer",
    "preset": "nsa.model.presets",
    "load_model": "nsa.model.saving",
    "NSACache": "nsa.model.cache",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
