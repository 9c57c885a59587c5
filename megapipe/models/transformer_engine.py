"""Layers that compute with Transformer Engine (--transformer-impl transformer_engine).

No other file names its modules. A layer here subclasses its plain-torch counterpart and has the
same parameters and layouts. For each call it sets its parameters on a Transformer Engine module,
hidden from torch's module tree. So initialisation, optimizer and checkpoints see no difference.
Written against version 2.20; docs/transformer_engine.md says how much is verified.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module, metadata
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megapipe.config import Config, ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.models.norm import Norm
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.fp8.products import FP8Recipe
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, bias_grad
from megapipe.tensor_parallel.weight_grad import WeightGrads, current_weight_grads

OLDEST = (2, 9)
"""The oldest version accepted, (major, minor)."""
_INSTALL = 'Install it with pip install --no-build-isolation "transformer_engine[pytorch]"'
# Failures of `import`: exception type, words of its text, the cause, and the remedy.
_STATES: tuple[tuple[type[Exception], str, str, str], ...] = (
    (ModuleNotFoundError, "named 'transformer_engine'", "is not installed", _INSTALL),
    (ModuleNotFoundError, "named", "lacks a Python package", _INSTALL),
    (RuntimeError, "meta package", "is its meta package alone, without kernels", _INSTALL),
    (FileNotFoundError, "shared object file", "lacks its extension for torch", _INSTALL),
    (
        RuntimeError,
        "cudnn shared object",
        "finds no cuDNN",
        "Install it with pip install nvidia-cudnn-cu{cuda}",
    ),
    (OSError, "libnccl", "finds no NCCL", "Install it with pip install nvidia-nccl-cu{cuda}"),
    (
        ImportError,
        "undefined symbol",
        "was built for another torch than {torch}",
        "Build it again with pip install --no-build-isolation --no-cache-dir --force-reinstall "
        "--no-deps transformer_engine_torch=={version}",
    ),
    (
        AssertionError,
        "version mismatch",
        "is in parts of different versions",
        "Make them one with pip install --no-build-isolation --force-reinstall --no-deps "
        "transformer_engine=={version} transformer_engine_torch=={version} "
        "transformer_engine_cu{cuda}=={version}",
    ),
)


Impl = Literal["local", "transformer_engine"]
"""The value of --transformer-impl once `auto` has been decided."""


@cache
def load() -> Any:
    """Import and return the module transformer_engine.pytorch.

    Raises: ConfigError with the cause in its first line and a remedy in the second, if the import
        fails or the version is older than OLDEST.
    """
    try:
        import transformer_engine.pytorch as te  # torch has loaded the CUDA libraries by now
    except Exception as error:  # an incomplete installation may raise any type
        raise ConfigError(_explain(error)) from error
    if tuple(map(int, version().split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"--transformer-impl transformer_engine: Transformer Engine {version()} is older than "
            f"{oldest}.\n"
            f'      Use pip install --no-build-isolation "transformer_engine[pytorch]>={oldest}", '
            "or --transformer-impl local."
        )
    return te


def version() -> str:
    """Return the version of the installed Transformer Engine; "" if it is not installed."""
    try:
        return metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return ""


def _explain(error: Exception) -> str:
    """Return two lines for a failed import: the cause, and the remedy.

    Args:
        error: the error of the import.
    """
    text = " ".join(str(error).split())
    state = "cannot be imported"
    remedy = _INSTALL
    for kind, words, cause, helps in _STATES:
        if isinstance(error, kind) and words in text:
            state = cause
            remedy = helps
            break
    cuda = (torch.version.cuda or "13").split(".")[0]
    known = {"cuda": cuda, "torch": torch.__version__, "version": version()}
    quoted = text if len(text) < 160 else f"{text[:160]}..."
    return (
        f"--transformer-impl transformer_engine: Transformer Engine {state.format(**known)} "
        f"({type(error).__name__}: {quoted}).\n"
        f"      {remedy.format(**known)}, or use --transformer-impl local."
    )


def choose_layers(config: Config, on_gpu: bool) -> tuple[Impl, str]:
    """Decide between plain torch and Transformer Engine, as --transformer-impl says.

    on_gpu: whether the run computes on GPUs.
    Returns: the choice, and a text for the log that names the layers and the reason.
    Raises: ConfigError if Transformer Engine is requested and cannot be used.
    """
    impl, text = _choose(config, on_gpu)
    if impl != "local" and config.overlaps_tp:
        text += ", linear layers of plain torch (--tp-comm-overlap)"
    return impl, text + _precision(config, impl, on_gpu)


def _choose(config: Config, on_gpu: bool) -> tuple[Impl, str]:
    local = "layers of plain torch (local)"
    asked = config.model.transformer_impl
    if asked == "local" or (asked == "auto" and not on_gpu):
        return "local", local
    if asked == "auto" and not config.precision.half:
        return "local", f"{local}: Transformer Engine would round float32 products to TF32"
    try:
        load()
    except ConfigError as error:
        if asked != "auto":
            raise
        return "local", f"{local}: {error.problems[0].splitlines()[0]}"
    return "transformer_engine", f"layers of Transformer Engine {version()}"


def _precision(config: Config, impl: str, on_gpu: bool) -> str:
    """Return a text for the log on how FP8 products are computed; "" without FP8.

    Args:
        impl: the layers' implementation, "local" or "transformer_engine".
        on_gpu: whether the run computes on GPUs.
    """
    model = config.model
    if model.fp8_format is None:
        return ""
    gathered = ", weights gathered so" if config.gathers_fp8 else ""
    text = f", products of linear layers in FP8 ({model.fp8_format}, {model.fp8_recipe}{gathered}"
    if not on_gpu:
        return f"{text}: rounded to it and multiplied in float32)"
    # In these cases megapipe's own layers compute the FP8 products, see models/parts.py.
    own_recipe = model.fp8_recipe == "delayed" or model.no_fp8_wgrad
    own = own_recipe or config.gathers_fp8 or config.overlaps_tp
    if impl != "local" and not own:
        return f"{text})"
    if model.fp8_recipe in ("delayed", "tensorwise"):
        return f"{text}), by torch's scaled products"
    return f"{text}: rounded to it and multiplied in bf16, without its speed)"


def knows(fp8: FP8Recipe) -> bool:
    """Return whether te.Linear can quantise as `fp8` says, in any order of passes.

    With delayed scales it cannot, because every pass changes the scales. Nor can it leave weight
    gradients unquantised.
    """
    return fp8.kind != "delayed" and fp8.weight_grads


def quantising(fp8: FP8Recipe | None) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context in which te.Linear quantises its operands.

    Args:
        fp8: how to quantise. None: the context changes nothing.
    """
    if fp8 is None:
        return nullcontext
    recipes = import_module("transformer_engine.common.recipe")
    names = {
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    make = getattr(recipes, names[fp8.kind])
    recipe = make(fp8_format=recipes.Format[fp8.format.upper()])
    return partial(load().autocast, enabled=True, recipe=recipe)


class _Product:
    """x W^T by te.Linear, with the collectives of a column- or row-parallel layer.

    Weight gradients are added into `main_grad`. In a B pass Transformer Engine queues the product,
    and a W pass runs the oldest product of the queue. This product may belong to an earlier
    microbatch, which leaves the sum over microbatches the same.

    Args:
        shape: (inputs, outputs) of the layer before it is split.
        mode: "column" or "row".
    """

    def __init__(
        self,
        shape: tuple[int, int],
        mode: str,
        tp: Axis,
        sequence_parallel: bool,
        fp8: FP8Recipe | None,
    ) -> None:
        self.quantising = quantising(fp8)
        self.linear = load().Linear(
            *shape,
            bias=False,
            parallel_mode=mode,
            tp_group=tp.group,
            sequence_parallel=sequence_parallel,
            delay_wgrad_compute=True,
            # Every call sets our parameter as its weight, so the module's own takes no memory.
            device="meta",
        )
        assert self.linear.tp_size == tp.size, (
            "Transformer Engine needs torch.distributed to be initialised"
        )

    def __call__(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """Return x W^T: x [s, ..., in] -> [s, ..., out], split as the mode says."""
        te = self.linear
        owner = current_weight_grads()
        te.weight = weight
        te.fuse_wgrad_accumulation = getattr(weight, "main_grad", None) is not None
        # A delayed product can only be added into main_grad: te would overwrite weight.grad.
        self._delay(owner is not None and te.fuse_wgrad_accumulation)
        with self.quantising():
            y: Tensor = te(x)
        # In an evaluation there is no graph to hook.
        if owner is not None and te.fuse_wgrad_accumulation and y.grad_fn is not None:
            y.grad_fn.register_prehook(partial(self._before_backward, owner))
            y.grad_fn.register_hook(partial(self._after_backward, owner))
        return y

    def _before_backward(self, owner: WeightGrads, grads: Any) -> None:
        # In a BW pass te runs the weight's product during the input gradient's collective. A queued
        # product could not overlap with it.
        self._delay(owner.is_deferring)

    def _after_backward(self, owner: WeightGrads, grad_inputs: Any, grads: Any) -> None:
        if owner.is_deferring:
            owner.submit(self._weight_pass)

    def _weight_pass(self) -> None:
        # While the delay is off, backward_dw returns without a word and leaves the queue as it is.
        self._delay(True)
        self.linear.backward_dw()

    def _delay(self, on: bool) -> None:
        store = self.linear.wgrad_store
        if on:
            store.enable_delay_wgrad_compute()
        else:
            store.disable_delay_wgrad_compute()


class _AddBias(torch.autograd.Function):
    """y + bias, outside of te.Linear.

    When te delays weight gradients, it keeps one bias gradient in its queue and drops the others.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, bias_grad(ctx.bias, grad)


_add_bias: Callable[[Tensor, Tensor], Tensor] = _AddBias.apply


class _ByTE:
    """Mixin: the forward of a parallel linear layer by te.Linear.

    Attributes:
        mode: "column" or "row".
    """

    mode: str
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, input_size: int, output_size: int, *, tp: Axis, **options: Any) -> None:
        super().__init__(input_size, output_size, tp=tp, **options)  # type: ignore[call-arg]
        sequence_parallel = options.get("sequence_parallel", False)
        self._product = _Product(
            (input_size, output_size), self.mode, tp, sequence_parallel, options.get("fp8")
        )

    @eager
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, with the shapes of its plain-torch counterpart."""
        y = self._product(x, self.weight)
        if self.bias is None:
            return y
        return _add_bias(y, self.bias)


class TEColumnParallelLinear(_ByTE, ColumnParallelLinear):
    """ColumnParallelLinear that computes with te.Linear."""

    mode = "column"


class TERowParallelLinear(_ByTE, RowParallelLinear):
    """RowParallelLinear that computes with te.Linear."""

    mode = "row"


class TENorm(Norm):
    """Norm that computes with te.LayerNorm or te.RMSNorm."""

    def __init__(self, config: ModelConfig, size: int, *, sum_over_tp: bool = False) -> None:
        super().__init__(config, size, sum_over_tp=sum_over_tp)
        make = load().RMSNorm if self.bias is None else load().LayerNorm
        # In a tuple, so that torch does not register it as a submodule.
        self._te = (make(size, eps=self.epsilon, zero_centered_gamma=self.one_more, device="meta"),)

    @eager
    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., size] -> [..., size]."""
        (te,) = self._te
        te.weight = self.weight
        if self.bias is not None:
            te.bias = self.bias
        return te(x)  # type: ignore[no-any-return]


def attention_kernel(
    config: ModelConfig, tp: Axis
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return Transformer Engine's causal attention for uncut sequences.

    Returns: a function (q, k, v) -> [s, b, heads/t x d], with q [s, b, heads/t, d], k and v
        [s, b, groups/t, d]. None if --attention-backend names one of torch's kernels.
    """
    if config.attention_backend != "auto":
        return None
    window = None if config.window is None else (config.window, 0)
    kernel = load().DotProductAttention(
        config.heads // tp.size,
        config.head_dim,
        num_gqa_groups=config.query_groups // tp.size,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=window,
    )
    # A function and not the module: torch would register a module in the layer that holds it.
    return lambda q, k, v: kernel(q, k, v)
