"""The time of a training step on an H100 by a roofline, from every operation that the code of a GPU
starts.

    python -m tools.proofs.gpu [--json]

No GPU is needed, and none is measured: a fake CUDA device (fake_cuda.py) runs one layer, the head
with its loss and the update at full size, and each operation of torch counts as a kernel that takes
the longest of its bytes over BANDWIDTH, its multiplications over PRODUCTS or ATTENTION, and LEAST.
A region of the package (kernels/region.py) counts as one kernel; one that sums over tokens, as
norm_backward, will be two. Bubble and messages are left out.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapipe.config import ModelConfig, OptimizerConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.gpt import GPTModel
from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import MicrobatchContext
from tools.proofs.gpu import fake_cuda

GPU = torch.device("cuda", 0)
PEAK, PRODUCTS, ATTENTION = 989.4e12, 680e12, {"forward": 550e12, "backward": 450e12}
"""FLOP/s of an H100's data sheet in bf16, and assumed of large products and of causal attention."""
BANDWIDTH, LEAST = 0.8 * 3.35e12, 2e-6
_FREE = (
    "device view t transpose permute expand unsqueeze squeeze slice split split_with_sizes detach "
    "alias as_strided "
    "select _unsafe_view unbind chunk empty empty_like empty_strided new_empty new_empty_strided "
    "promote_types"
)
FREE = frozenset(_FREE.split())
"""Operations that start no kernel."""
LLAMA = ModelConfig(
    group_query_attention=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    cross_entropy_loss_fusion=True,
)
_1_3B = replace(LLAMA, num_layers=24, hidden_size=2048, num_attention_heads=16, num_query_groups=16)
_8B = replace(LLAMA, num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8)
MODELS = {
    "1.3B": (8, 4, 2048, replace(_1_3B, padded_vocab_size=50304)),
    "8B": (64, 1, 4096, replace(_8B, padded_vocab_size=128256, ffn_hidden_size=14336)),
    "1.3B, 8 experts of which a token takes 2": (
        8,
        4,
        2048,
        replace(_1_3B, padded_vocab_size=50304, num_experts=8),
    ),
}
"""Microbatches of a step on one model, sequences of each, their tokens, and the model."""


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds, kernels, bytes and FLOPs of what runs inside, by the name of the operation.

    Attributes:
        waited: seconds for what travels beside, see `send`; travelled: of all that.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = defaultdict[str, float](float)
        self.kernels, self.bytes, self.flops = Counter[str](), 0.0, 0.0
        self.waited = self.travelled = self._link_free = 0.0

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return sum(self.seconds.values()) + self.waited

    def send(self, seconds: float) -> float:
        """Begin to send for a time, after the sends that have begun.

        Returns: the time at which it ends.
        """
        self._link_free = max(self.now, self._link_free) + seconds
        self.travelled += seconds
        return self._link_free

    def wait_for(self, end: float) -> None:
        """Nothing is computed until then."""
        self.waited += max(0.0, end - self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda]
        if name not in FREE and given:
            self._count(name, args, given, written(func, args, kwargs or {}, out))
        return out

    def _count(
        self, name: str, args: Sequence[Any], given: list[Tensor], made: list[Tensor]
    ) -> None:
        moved = sum(x.nbytes for x in given) + sum(x.nbytes for x in made)
        moved -= (
            given[0].nbytes if name.startswith(("fill", "zero", "copy_")) else 0
        )  # only written
        flops, rate = 0.0, PRODUCTS
        if name == "gather":  # reads what it takes
            moved = 2 * sum(x.nbytes for x in made)
        elif name in ("mm", "addmm", "_grouped_mm"):
            left, right = [x for x in args if isinstance(x, Tensor)][
                slice(2) if name == "_grouped_mm" else slice(-2, None)
            ]
            flops = 2.0 * left.numel() * right.shape[-1]
        elif "attention" in name:
            way = "backward" if "backward" in name else "forward"
            query, key = given[1:3] if way == "backward" else given[:2]
            flops = (
                (5.0 if way == "backward" else 2.0) * query.numel() * key.shape[2]
            )  # causal: half
            rate, moved = ATTENTION[way], 0
        self.flops, self.bytes = self.flops + flops, self.bytes + moved
        self.seconds[name] += max(moved / BANDWIDTH, flops / rate, LEAST)
        self.kernels[name] += 1


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> list[Tensor]:
    """Return the tensors that an operation makes, or changes in place if it returns none."""
    if (made := [x for x in tree_leaves(out) if isinstance(x, Tensor)]) or func._schema.returns:
        return made
    given = dict(zip((place.name for place in func._schema.arguments), args, strict=False)) | kwargs
    changed = [given.get(place.name) for place in func._schema.arguments if place.is_write]
    return [x for x in tree_leaves(changed) if isinstance(x, Tensor)]


def passes(
    config: ModelConfig, span: LayerSpan, x: Tensor, labels: Tensor | None
) -> tuple[Roofline, Roofline]:
    """Forward, and backward with weight gradients, of a part of the model."""
    model = GPTModel(config, span, Axis(device=GPU)).to(GPU).bfloat16()
    model.most_kept = (
        x.numel() // config.hidden * (config.padded_vocab_size or 0)
    )  # see plan.logits
    FlatBuffers(dict(model.named_parameters()), device=GPU)

    def forward() -> Tensor:
        model.set_input_tensor(x.detach().requires_grad_())
        with MicrobatchContext(0, 0).active():
            return model(labels=labels)  # type: ignore[no-any-return]

    forward()  # tables of angles are made once
    with Roofline() as there:
        out = forward()
    with Roofline() as back:
        torch.autograd.backward(out, torch.ones_like(out))
    return there, back


def update(config: ModelConfig) -> tuple[Roofline, int]:
    """Return the roofline of an update with its norm and clipping, and the number of its
    parameters.
    """
    model = GPTModel(config, LayerSpan(0, 2, False, False), Axis(device=GPU)).to(GPU).bfloat16()
    optimizer = Optimizer([model], OptimizerConfig(clip_grad=1.0), ProcessMesh.single(GPU))
    with Roofline() as roof:
        optimizer.update(optimizer.reduce(0.125), Rates(1e-3), optimizer.shrink(2.0))
        optimizer.zero_grad()
    return roof, sum(param.numel() for param in model.parameters())


def figures(name: str) -> dict[str, object]:
    """Return the figures of a model of MODELS, with its MFU: FLOPs of the products and causal
    attention of a step over PEAK.
    """
    microbatches, batch, seq, model = MODELS[name]
    config = replace(model, max_position_embeddings=seq)
    layers, vocab = config.layers, config.padded_vocab_size or 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(seq, batch, config.hidden, device=GPU, dtype=torch.bfloat16)
        labels = torch.zeros(batch, seq, dtype=torch.int64, device=GPU)
        of_layer = passes(config, LayerSpan(0, 1, False, False), x, None)
        of_head = passes(config, LayerSpan(layers, 0, False, True), x, labels)
        of_update, parameters = update(config)
    seconds = sum(of_update.seconds.values())
    one, head = (sum(sum(roof.seconds.values()) for roof in part) for part in (of_layer, of_head))
    flops = sum(roof.flops for roof in of_layer)
    needed = layers * flops + 6.0 * batch * seq * config.hidden * vocab
    whole = layers * parameters / 2 + 2 * vocab * config.hidden
    step = layers * one + head + seconds / parameters * whole / microbatches
    h, ffn, queries = config.hidden, config.ffn, config.heads * config.head_dim
    keys = config.query_groups * config.head_dim
    experts, k = config.num_experts or 1, config.moe_router_topk if config.num_experts else 1
    inputs_outputs = 3 * (
        3 * h + queries + 2 * keys + k * (2 * h + 3 * ffn)
    )  # of four linear layers' three products
    between = (
        17 * h + 4 * (queries + keys) + k * 8 * ffn
    )  # norms with residuals, rotation, SwiGLU, both ways
    between += 4 * (1 + k) * h * (experts > 1)  # rows to their experts and back
    weights = (
        h * (2 * queries + 2 * keys) + experts * 3 * h * ffn
    )  # read twice in bf16, gradients read and written
    least = 2 * batch * seq * (inputs_outputs + between) + weights * (2 * 2 + 2 * 4)
    return {
        "model": name,
        "kernels of a layer": sum(sum(roof.kernels.values()) for roof in of_layer),
        "layer ms": 1e3 * one,
        "layer MFU": flops / PEAK / one,
        "bytes of a layer over the least": sum(roof.bytes for roof in of_layer) / least,
        "head ms": 1e3 * head,
        "update ms": 1e3 * seconds / parameters * whole,
        "bytes of an update per weight": of_update.bytes / parameters,
        "step MFU": needed / PEAK / step,
        "layer ms by operation": longest(of_layer),
        "head ms by operation": longest(of_head),
    }


def longest(part: tuple[Roofline, Roofline]) -> dict[str, float]:
    """Milliseconds of the operations that take most."""
    there, back = (roof.seconds for roof in part)
    summed = sorted(((there[name] + back[name], name) for name in {*there, *back}), reverse=True)
    return {name: round(1e3 * seconds, 3) for seconds, name in summed[:10]}


def main(as_json: bool) -> None:
    # Imported late: the package makes the device known, which tests do not need.
    from tools.proofs.gpu.emulated.attention import attention

    fake_cuda.move_parameters()
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    found = [figures(name) for name in MODELS]
    if as_json:
        print(json.dumps(found))
        return
    for row in found:
        for key, value in row.items():
            print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}")
