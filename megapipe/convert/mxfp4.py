"""Read tensors in mxfp4, as gpt-oss is published: numbers of 4 bits, 32 of them with one scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.convert.tensors import SavedTensors

_BLOCKS = "_blocks"
_SCALES = "_scales"
# A number of 4 bits: its sign, two bits of exponent, one of fraction (OCP 2023, section 5.3.3).
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def is_mxfp4(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that the experts' weights are in mxfp4."""
    said = content.get("quantization_config")
    return isinstance(said, dict) and said.get("quant_method") == "mxfp4"


class Mxfp4Tensors(SavedTensors):
    """The tensors of a folder. Tensors in mxfp4 are read as bfloat16.

    A tensor NAME of shape [E, in, out] stands in the files as NAME_blocks [E, out, in / 32, 16],
    two numbers in each byte, and NAME_scales [E, out, in / 32].
    """

    def __init__(
        self, folder: Path, renamed: Callable[[str], str | None] = lambda name: name
    ) -> None:
        super().__init__(folder, renamed)
        # Name of a tensor -> the shapes of its blocks and of its scales.
        self._quantised: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for name in [name for name in self.shapes if name.endswith(_BLOCKS)]:
            bare = name.removesuffix(_BLOCKS)
            # Without scales the blocks stay, and are refused as tensors of an unknown name.
            if self.shapes.get(bare + _SCALES) != self.shapes[name][:-1]:
                continue
            experts, rows, groups, bytes_ = self.shapes.pop(name)
            del self.shapes[bare + _SCALES]
            self.shapes[bare] = (experts, groups * bytes_ * 2, rows)
            self.dtypes[bare] = torch.bfloat16
            self._quantised[bare] = ((experts, rows, groups, bytes_), (experts, rows, groups))

    def read(self, key: str) -> Tensor:
        """Return the whole tensor of a name, in bfloat16 if it is stored in mxfp4."""
        if key not in self._quantised:
            return super().read(key)
        parts = []
        for suffix, shape in zip((_BLOCKS, _SCALES), self._quantised[key], strict=True):
            self.shapes[key + suffix] = shape
            parts.append(super().read(key + suffix))
            del self.shapes[key + suffix]
        return dequantised(*parts)


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks [E, out, groups, 16] and scales [E, out, groups]: [E, in, out].

    Both are uint8. A byte of blocks has two numbers, the first in the lower bits. A group is 32
    numbers with one scale, an exponent plus 127. The result is exact in bfloat16.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    numbers = values[pairs.long()].flatten(-2)
    exponents = (scales.int() - _BIAS)[..., None]
    rows = torch.ldexp(numbers, exponents).flatten(-2)
    return rows.to(torch.bfloat16).transpose(1, 2).contiguous()
