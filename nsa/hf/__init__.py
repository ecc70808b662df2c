"""NSA in Hugging Face's transformers: `import nsa.hf` registers the model with its Auto classes.

`NSAConfig` here is transformers' kind of config: all fields of `nsa.model.config.ModelConfig`, of
which `nsa` holds the block sizes of `nsa.config.NSAConfig`.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM, __version__
except ImportError as error:
    raise ImportError(
        "nsa.hf needs transformers, version 5, which is not to be had here "
        f"({error}); pip install 'nsa[hf]' brings it"
    ) from error
if __version__.split(".")[0] != "5":
    raise ImportError(
        f"nsa.hf needs transformers, version 5, and found {__version__}; pip install 'nsa[hf]' "
        "brings it"
    )

from nsa.hf.cache import GenerationCache
from nsa.hf.config import NSAConfig
from nsa.hf.convert import from_checkpoint, from_llama, to_checkpoint
from nsa.hf.model import NSAForCausalLM

__all__ = [
    "GenerationCache",
    "NSAConfig",
    "NSAForCausalLM",
    "from_checkpoint",
    "from_llama",
    "to_checkpoint",
]

AutoConfig.register(NSAConfig.model_type, NSAConfig, exist_ok=True)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM, exist_ok=True)
