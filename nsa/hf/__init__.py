"""NSA in Hugging Face's transformers: `import nsa.hf` registers its models with the Auto classes.

If this package is installed, that happens automatically, see `nsa_autoload`.

`NSAConfig` here is a transformers config with all fields of `nsa.model.config.ModelConfig`, of
which `nsa` holds the block sizes of `nsa.config.NSAConfig`.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "nsa.hf needs transformers, version 5, which is not to be had here "
        f"({error}); pip install 'nsa[hf]' brings it"
    ) from error
if transformers.__version__.split(".")[0] != "5":
    raise ImportError(
        f"nsa.hf needs transformers, version 5, and found {transformers.__version__}; "
        "pip install 'nsa[hf]' brings it"
    )

from nsa.hf.base import NSAModel
from nsa.hf.cache import GenerationCache
from nsa.hf.config import AUTO, NSAConfig
from nsa.hf.convert import from_checkpoint, from_llama, to_checkpoint
from nsa.hf.fla import from_fla, to_fla
from nsa.hf.model import (
    NSAForCausalLM,
    NSAForSequenceClassification,
    NSAForTokenClassification,
)

__all__ = [
    "GenerationCache",
    "NSAConfig",
    "NSAForCausalLM",
    "NSAForSequenceClassification",
    "NSAForTokenClassification",
    "NSAModel",
    "from_checkpoint",
    "from_fla",
    "from_llama",
    "to_checkpoint",
    "to_fla",
]

transformers.AutoConfig.register(NSAConfig.model_type, NSAConfig, exist_ok=True)
for _auto, _name in AUTO.items():
    if _auto != "AutoConfig":
        getattr(transformers, _auto).register(NSAConfig, globals()[_name], exist_ok=True)
