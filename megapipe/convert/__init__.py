"""Convert Hugging Face models and Megatron-LM checkpoints to megapipe's and back, of any size."""

from megapipe.convert.checkpoints import Converted, export_checkpoint, import_checkpoint
from megapipe.convert.huggingface.checks import compare_logits
from megapipe.convert.huggingface.listing import listing
from megapipe.convert.megatron.ranks import Sizes, export_ranks
from megapipe.convert.megatron.run import import_megatron
from megapipe.convert.megatron.write import export_megatron
from megapipe.convert.tensors import SavedTensors, load_full

__all__ = [
    "Converted",
    "SavedTensors",
    "Sizes",
    "compare_logits",
    "export_checkpoint",
    "export_megatron",
    "export_ranks",
    "import_checkpoint",
    "import_megatron",
    "listing",
    "load_full",
]
