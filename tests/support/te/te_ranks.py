"""What the ranks of tests/models/test_transformer_engine.py do, each in its process with the shim.

They answer with arrays: a tensor that takes itself for CUDA's cannot be sent.
"""

import importlib
import inspect
from dataclasses import replace

import te_shim
import torch
from tiny import run_step

from megapipe.distributed.tokens import Documents
from megapipe.models.layer import TransformerLayer
from megapipe.models.transformer_engine import TEColumnParallelLinear, TERowParallelLinear, load
from megapipe.schedule import build
from megapipe.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads

LOCAL = {"column": ColumnParallelLinear, "row": RowParallelLinear}
THEIRS = {"column": TEColumnParallelLinear, "row": TERowParallelLinear}


def step(mesh, model, schedule, microbatches):
    """`run_step` in float32 with Transformer Engine's layers."""
    te_shim.install()
    model = replace(model, transformer_impl="transformer_engine")
    losses, gradients = run_step(mesh, model, build(schedule, mesh.pp.size, microbatches), torch.float32)
    return losses, {name: (gradient.numpy(), *others) for name, (gradient, *others) in gradients.items()}


def contract(mesh):
    """{class: {argument: default}} of what we call."""
    te_shim.install()
    te = load()
    found = {}
    for name in ("Linear", "LayerNorm", "RMSNorm", "DotProductAttention"):
        arguments = inspect.signature(getattr(te, name)).parameters.values()
        found[name] = {a.name: a.default for a in arguments if a.kind is not a.VAR_KEYWORD}
    return found


def names(mesh, model):
    """The names under which a layer would save what it has, [local, Transformer Engine]."""
    te_shim.install()
    models = (model, replace(model, transformer_impl="transformer_engine"))
    return [list(TransformerLayer(m, mesh.tp, 0).state_dict()) for m in models]


def linear_attributes(mesh):
    """What the te.Linear of a column layer [12, 8] believes to be."""
    te_shim.install()
    te = TEColumnParallelLinear(8, 12, tp=mesh.tp, bias=True, sequence_parallel=True)._product.linear
    return te.tp_size, te.parallel_mode, te.sequence_parallel, te.use_bias, te.out_features, te.in_features


def linear(mesh, kind, sequence_parallel, dtype):
    """`three_microbatches` with Transformer Engine."""
    te_shim.install()
    found = three_microbatches(THEIRS[kind], mesh.tp, kind, sequence_parallel, dtype)
    return {name: tensor.float().numpy() for name, tensor in found.items()}


def three_microbatches(make, tp, kind, sequence_parallel, dtype):
    """Through a linear layer: B0, B1, BW2, then W1 and W0. Returns every tensor of interest by name.

    Weights, inputs and gradients are representable in bf16 whatever the dtype, so that those of all dtypes are equal.
    """
    layer = make(8, 12, tp=tp, bias=True, sequence_parallel=sequence_parallel)
    initialize(layer, 1, tp)
    layer = layer.bfloat16().to(dtype)
    for param in layer.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)
    rows = 6 // tp.size if sequence_parallel and kind == "column" else 6
    draw = torch.Generator().manual_seed(3 + tp.rank * (sequence_parallel or kind == "row"))

    def random(*shape):
        return torch.randn(shape, generator=draw).bfloat16().to(dtype)

    inputs = [random(rows, 2, layer.weight.shape[1]).requires_grad_() for _ in range(3)]
    owner = WeightGrads()
    with owner.capturing():
        outputs = [layer(x) for x in inputs]
    draw.manual_seed(9)
    grads = [random(*y.shape) for y in outputs]
    found = dict(zip(("y0", "y1", "y2"), (y.detach() for y in outputs), strict=True))
    for microbatch in (0, 1):
        with owner.deferring(microbatch):
            outputs[microbatch].backward(grads[microbatch])
    found["weight before W"] = layer.weight.main_grad.clone()
    outputs[2].backward(grads[2])
    found["weight after BW"] = layer.weight.main_grad.clone()
    with torch.no_grad():
        owner.run(1)
        owner.run(0)
    found |= {f"dx{i}": x.grad for i, x in enumerate(inputs)}
    assert layer.weight.grad is None
    return found | {name: param.main_grad for name, param in layer.named_parameters()}


def documents(mesh, model):
    """A layer's output for sequences of several documents, [local, Transformer Engine]."""
    te_shim.install()
    x = torch.randn(12, 2, model.hidden, generator=torch.Generator().manual_seed(3))
    found = []
    for impl in ("local", "transformer_engine"):
        layer = TransformerLayer(replace(model, transformer_impl=impl), mesh.tp, 0)
        initialize(layer, 1, mesh.tp)
        with torch.no_grad(), MicrobatchContext(0, 0, Documents(((5, 7), (12,)), isolate=True, restart=True)).active():
            found.append(layer(x).numpy())
    return found


def without_main_grad(mesh):
    """(gradient, expected) of a weight that autograd keeps, two microbatches inside of a stage's B passes."""
    te_shim.install()
    layer = TEColumnParallelLinear(8, 12, tp=mesh.tp, bias=True)
    initialize(layer, 1, mesh.tp)
    x = torch.randn(2, 5, 2, 8, generator=torch.Generator().manual_seed(3))
    owner = WeightGrads()
    for microbatch in range(2):
        with owner.capturing():
            y = layer(x[microbatch])
        with owner.deferring(microbatch):
            y.sum().backward()
        owner.run(microbatch)
    return layer.weight.grad.numpy(), x.sum((0, 1, 2)).expand(12, 8).numpy()


def recipes(mesh, model):
    """What Transformer Engine is told of each recipe it has: (quantises, recipe, format), and whether it goes on so."""
    te_shim.install()
    te = importlib.import_module("transformer_engine.pytorch.quantization")
    for kind in ("FP8", "MXFP8", "FP8_BLOCK_SCALING", "NVFP4"):
        setattr(te, f"_{kind}_SUPPORT", (True, ""))  # what it found when it asked for a GPU
    found = []
    for kind in ("tensorwise", "blockwise", "mxfp8"):
        settings = replace(model, transformer_impl="transformer_engine", fp8_format="hybrid", fp8_recipe=kind)
        layer = TransformerLayer(settings, mesh.tp, 0).mlp.linear_fc1
        with layer._product.quantising():
            recipe = te.FP8GlobalStateManager.get_fp8_recipe()
            found.append((te.FP8GlobalStateManager.is_fp8_enabled(), type(recipe).__name__, recipe.fp8_format.name))
    return found, te.FP8GlobalStateManager.is_fp8_enabled()


def not_theirs(mesh, model):
    """Types of a layer's projections where its own recipe would not keep to a step."""
    te_shim.install()
    delayed = replace(model, transformer_impl="transformer_engine", fp8_format="hybrid")
    parts = (delayed, replace(delayed, fp8_recipe="tensorwise", no_fp8_wgrad=True))
    return [type(TransformerLayer(settings, mesh.tp, 0).mlp.linear_fc1).__name__ for settings in parts]
