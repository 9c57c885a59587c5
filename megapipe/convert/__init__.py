"""Checkpoints of the Hugging Face hub to ours and back: GPT-2, Llama, Qwen2 and Qwen3 of any size."""

from megapipe.convert.checks import compare_logits
from megapipe.convert.convert import Converted, export_checkpoint, import_checkpoint
from megapipe.convert.tensors import SavedTensors, load_full

__all__ = ["Converted", "SavedTensors", "compare_logits", "export_checkpoint", "import_checkpoint", "load_full"]
