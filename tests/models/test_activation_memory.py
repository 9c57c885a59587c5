"""A layer keeps what the formulas of Korthikanti et al. 2022, section 4, say: counted in bytes of distinct storages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from tiny import GPT2

from megapipe.config import ModelConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.layer import TransformerLayer
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Costs
from megapipe.tensor_parallel.rng import initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads

S, B, H, A = 128, 2, 256, 8
DROPOUT = replace(GPT2, hidden_size=H, num_attention_heads=A, max_position_embeddings=S)
FLASH = replace(DROPOUT, attention_dropout=0.0)


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages, each once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def kept(mesh: ProcessMesh, model: ModelConfig) -> tuple[int, int]:
    """Bytes that one layer holds between F and B, and between B and W."""
    layer = TransformerLayer(model, mesh.tp, 0)
    initialize(layer, 1, mesh.tp)
    layer.bfloat16()
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    for p in layer.parameters():
        p.main_grad = torch.zeros(p.shape)
    rows = S // mesh.tp.size if model.sequence_parallel else S
    x = torch.randn(rows, B, H).bfloat16().requires_grad_()
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    stage = WeightGrads()
    with stage.capturing():
        y = layer(x)
    with stage.deferring(0):
        y.backward(torch.randn(y.shape).bfloat16())
    cells = [cell.cell_contents for job in stage._owed[0] for cell in job.__closure__ or ()]
    owed = [c for c in cells if isinstance(c, torch.Tensor) and c.dtype == torch.bfloat16]
    return size(saved), size(owed)


@pytest.mark.parametrize("attention", ["plain", "flash"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_activations_of_a_layer_are_those_of_the_formula(tp, sequence_parallel, attention):
    model = replace(DROPOUT if attention == "plain" else FLASH, sequence_parallel=sequence_parallel)
    formula = Costs.transformer(
        H, S, A, micro_batch_size=B, tensor=tp, sequence_parallel=sequence_parallel, attention=attention
    )
    for for_b, for_w in run_threads(lambda mesh: kept(mesh, model), tp=tp):
        assert for_b == pytest.approx(formula.mem_b, rel=0.02)
        assert for_w == formula.mem_w
