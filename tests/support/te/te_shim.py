"""Transformer Engine's own Python layer on a CPU: its pure wheel, with reference numerics for its native functions.

What runs is the real constructors, modules and autograd functions of Transformer Engine; only what it would compute on
a GPU is written here. `install` changes torch for the whole process, so only processes of their own call it.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

WHEEL = "MEGAPIPE_TE_WHEEL"
"""A wheel of transformer_engine, or a folder that holds the unpacked package. It is taken from where a wheel has been
unpacked beside it, as each of its modules is compiled only once there."""


def absent():
    """Why there is nothing to test, or None."""
    given = os.environ.get(WHEEL)
    if given:
        return None if Path(given).exists() else f"{WHEEL}={given} does not exist"
    try:
        metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return f"no transformer_engine here; {WHEEL} names its wheel (pip download --no-deps transformer_engine)"
    return None


def install():
    """Make `import transformer_engine.pytorch` work in this process."""
    if "transformer_engine.pytorch" in sys.modules:
        return
    assert absent() is None, absent()
    if given := os.environ.get(WHEEL):
        unpacked = given.removesuffix(".whl")
        sys.path.insert(0, unpacked if Path(unpacked).is_dir() else given)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # Transformer Engine then looks for no CUDA libraries
    # What is left of attention is written in torch.
    os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_MASKED_SOFTMAX_FUSION": "0"}
    sys.modules["transformer_engine_torch"] = _native()
    sys.meta_path.append(_Absent())
    _pretend_cuda()
    # common is imported first, so that the package finds it with nothing to load.
    package = types.ModuleType("transformer_engine")
    package.__path__ = list(importlib.util.find_spec("transformer_engine").submodule_search_locations)
    sys.modules["transformer_engine"] = package
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda name: None
    del sys.modules["transformer_engine"]
    importlib.import_module("transformer_engine.pytorch")
    importlib.import_module("transformer_engine.pytorch.utils")._empty_tensor = lambda: torch.empty(0)
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    gemm.get_cublas_workspace = lambda *args: torch.empty(1)
    utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    utils.get_cudnn_version = lambda: (9, 20, 0)


def _pretend_cuda():
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(major=9, minor=0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.is_cuda = property(lambda self: True)
    for name in ("arange", "empty", "ones", "zeros"):
        setattr(torch, name, partial(_on_cpu, getattr(torch, name)))


def _on_cpu(make, *args, device=None, **kwargs):
    return make(*args, device="cpu" if device == "cuda" else device, **kwargs)


# The native module. Column-major as cuBLAS, so the second operand's rows are the result's.


def generic_gemm(a, transa, b, transb, out, quantizer, dtype, bias, bias_dtype, gelu, gelu_in, grad, *rest, **others):
    accumulate = rest[2]
    assert quantizer is None
    assert not gelu
    assert others["comm_overlap"] is None
    left, right = (x.reshape(-1, x.shape[-1]).float() for x in (b, a))
    product = (left.t() if transb else left) @ (right.t() if transa else right)
    if bias is not None and not grad:
        product += bias
    if out is None:
        kind = dtype if isinstance(dtype, torch.dtype) else TORCH[int(dtype)]
        shape = product.shape if transb else (*b.shape[:-1], product.shape[-1])
        out = product.to(kind).view(shape)
    elif accumulate:
        out += product
    else:
        out.copy_(product)
    return out, None if bias is None else left.sum(0), None, None


def rmsnorm_fwd(x, weight, epsilon, out, quantizer, dtype, margin, zero_centered):
    scale = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * scale * (weight + zero_centered)).to(x.dtype), None, scale.squeeze(-1)


def rmsnorm_bwd(dy, x, scale, weight, margin, zero_centered):
    x_hat, g = x * scale[:, None], dy * (weight + zero_centered)
    dx = scale[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * x_hat).sum(0).to(x.dtype)


def layernorm_fwd(x, weight, bias, epsilon, out, quantizer, dtype, margin, zero_centered):
    mean = x.float().mean(-1)
    scale = (x.float().var(-1, correction=0) + epsilon).rsqrt()
    y = (x - mean[:, None]) * scale[:, None] * (weight + zero_centered) + bias
    return y.to(x.dtype), mean, scale


def layernorm_bwd(dy, x, mean, scale, weight, margin, zero_centered):
    x_hat, g = (x - mean[:, None]) * scale[:, None], dy * (weight + zero_centered)
    dx = scale[:, None] * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * x_hat).sum(0).to(x.dtype), dy.sum(0).to(x.dtype)


DType = IntEnum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1")
NVTE_Fused_Attn_Backend = IntEnum("NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8")
TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
FUNCTIONS = (generic_gemm, rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)


class _Names(type):
    """A class of constants: every name is one."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return hash(name) % 1000


class _Native(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return _Names(name, (), {})

        def missing(*args, **kwargs):
            raise NotImplementedError(f"the shim has no transformer_engine_torch.{name}")

        return missing


def _native():
    module = _Native("transformer_engine_torch")
    module.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
    for given in (DType, NVTE_Fused_Attn_Backend, *FUNCTIONS):
        setattr(module, given.__name__, given)
    return module


class _Anything:
    """A module, decorator or value of a package that Transformer Engine imports and these tests never use."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _Absent:
    """Finds the optional packages that are not here."""

    names = ("einops", "onnx", "onnxscript", "pydantic", "triton")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "3.0.0"  # triton's
        module.dataclass = dataclass  # pydantic's
        module.__getattr__ = lambda name: _Anything().__getattr__(name)
        return module

    def exec_module(self, module):
        pass
