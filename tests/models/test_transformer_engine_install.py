"""Every way in which Transformer Engine can be absent or half there has its sentence, and `auto` goes on without it.

Real packages in a folder of their own, imported by a process of its own.
"""

import os
import zipfile
from importlib import util

import programs
import pytest
import te_shim
import torch

from megapipe.config import Config
from megapipe.models.transformer_engine import choose_layers

LOAD = """
from megapipe.models.transformer_engine import load
try:
    load()
except Exception as error:
    print(type(error).__name__, type(error.__cause__).__name__)
    print(error)
"""
CHOOSE = """
from megapipe.config import Config, ModelConfig, PrecisionConfig
from megapipe.models.transformer_engine import choose_layers
auto = ModelConfig(transformer_impl="auto")
print(*choose_layers(Config(model=auto, precision=PrecisionConfig(bf16=True)), True), sep=": ")
"""


def package(folder, name, version, source=None):
    """A distribution, with a Python package if there is a source; returns the folder."""
    if source is not None:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\n")
    return folder


def pure_wheel(folder):
    """What `pip install transformer_engine` without extras gives."""
    with zipfile.ZipFile(os.environ[te_shim.WHEEL]) as wheel:
        wheel.extractall(folder)
    return folder


def run(code, folder):
    """The lines that a program in a folder prints, which imports what lies beside it."""
    (folder / "main.py").write_text(code)
    done = programs.run([folder / "main.py"])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


nothing_installed = pytest.mark.skipif(util.find_spec("transformer_engine") is not None, reason="it is installed here")
needs_wheel = pytest.mark.skipif(
    not os.environ.get(te_shim.WHEEL, "").endswith(".whl"), reason=f"{te_shim.WHEEL} names no wheel"
)


@nothing_installed
def test_nothing_is_installed(tmp_path):
    assert run(LOAD, tmp_path) == [
        "ConfigError ModuleNotFoundError",
        "--transformer-impl transformer_engine: Transformer Engine is not installed (ModuleNotFoundError: No module "
        "named 'transformer_engine').",
        '      Install it with pip install --no-build-isolation "transformer_engine[pytorch]", or use '
        "--transformer-impl local.",
    ]


@needs_wheel
def test_the_meta_package_alone(tmp_path):
    kinds, what, remedy = run(LOAD, pure_wheel(tmp_path))
    assert kinds == "ConfigError RuntimeError"
    assert "Transformer Engine is its meta package alone, without kernels (RuntimeError: Found empty" in what
    assert remedy.strip().startswith('Install it with pip install --no-build-isolation "transformer_engine[pytorch]"')


@needs_wheel
def test_parts_of_different_versions(tmp_path):
    kinds, what, remedy = run(LOAD, package(pure_wheel(tmp_path), "transformer_engine_cu13", "2.19.0"))
    assert kinds == "ConfigError AssertionError"
    assert "Transformer Engine is in parts of different versions (AssertionError: Transformer Engine package" in what
    assert "transformer_engine_torch==2.20.2 transformer_engine_cu13==2.20.2, or use" in remedy


@needs_wheel
def test_no_cudnn(tmp_path):
    kinds, what, remedy = run(LOAD, package(pure_wheel(tmp_path), "transformer_engine_cu13", "2.20.2"))
    assert kinds == "ConfigError RuntimeError"
    assert "Transformer Engine finds no cuDNN (RuntimeError: cudnn shared object not found.)." in what
    assert remedy.strip().startswith("Install it with pip install nvidia-cudnn-cu13, or use")


@pytest.mark.parametrize(
    ("source", "kind", "means", "helps"),
    [
        ("import ctypes\nctypes.CDLL('libnccl.so.none')", "OSError", "finds no NCCL", "pip install nvidia-nccl-cu13"),
        (
            "raise ImportError('transformer_engine_torch.so: undefined symbol: _ZN3c10')",
            "ImportError",
            f"was built for another torch than {torch.__version__}",
            "--no-deps transformer_engine_torch==2.20.2",
        ),
        ("import torch\ntorch.no_such_thing", "AttributeError", "cannot be imported", "pip install"),
        ("import einops_that_is_not_there", "ModuleNotFoundError", "lacks a Python package", "pip install"),
        (
            "raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')",
            "FileNotFoundError",
            "lacks its extension for torch",
            "pip install",
        ),
    ],
)
def test_other_ways_to_be_broken(tmp_path, source, kind, means, helps):
    kinds, what, remedy = run(LOAD, package(tmp_path, "transformer_engine", "2.20.2", source))
    assert kinds == f"ConfigError {kind}"
    assert f"Transformer Engine {means} ({kind}: " in what
    assert helps in remedy
    assert remedy.endswith("or use --transformer-impl local.")


def test_an_old_version_is_refused(tmp_path):
    folder = package(tmp_path, "transformer_engine", "2.8.0", "")
    (folder / "transformer_engine" / "pytorch.py").touch()
    assert run(LOAD, folder)[1:] == [
        "--transformer-impl transformer_engine: Transformer Engine 2.8.0 is older than 2.9.",
        '      Use pip install --no-build-isolation "transformer_engine[pytorch]>=2.9", or --transformer-impl local.',
    ]


def test_auto_takes_what_works_and_says_why_not(tmp_path):
    folder = package(tmp_path, "transformer_engine", "2.20.2", "")
    assert run(CHOOSE, folder) == [
        "local: layers of plain torch (local): --transformer-impl transformer_engine: Transformer Engine lacks a "
        "Python package (ModuleNotFoundError: No module named 'transformer_engine.pytorch')."
    ]
    (folder / "transformer_engine" / "pytorch.py").touch()
    assert run(CHOOSE, folder) == ["transformer_engine: layers of Transformer Engine 2.20.2"]


def test_in_fp8_it_multiplies_what_its_recipes_say_and_torch_the_rest(tmp_path):
    """Scales of earlier steps, and products of which one is not in FP8, are beyond te.Linear."""
    folder = package(tmp_path, "transformer_engine", "2.20.2", "")
    (folder / "transformer_engine" / "pytorch.py").touch()
    cases = [("delayed", False), ("tensorwise", False), ("blockwise", False), ("tensorwise", True), ("blockwise", True)]
    asked = "ModelConfig(transformer_impl='auto', fp8_format='hybrid', fp8_recipe=recipe, no_fp8_wgrad=wide)"
    chosen = f"choose_layers(Config(model={asked}, precision=PrecisionConfig(bf16=True)), True)[1]"
    code = f"{CHOOSE}\nfor recipe, wide in {cases}:\n    print({chosen}.partition(' in FP8 ')[2])"
    assert run(code, folder)[1:] == [
        "(hybrid, delayed), by torch's scaled products",
        "(hybrid, tensorwise)",
        "(hybrid, blockwise)",
        "(hybrid, tensorwise), by torch's scaled products",
        "(hybrid, blockwise: rounded to it and multiplied in bf16, without its speed)",
    ]


def test_auto_is_local_where_it_must_be():
    def chosen(on_gpu, **precision):
        return choose_layers(Config().with_fields(transformer_impl="auto", **precision), on_gpu)

    assert chosen(False, bf16=True) == ("local", "layers of plain torch (local)")
    assert chosen(True) == (
        "local",
        "layers of plain torch (local): Transformer Engine would round float32 products to TF32",
    )


def test_local_never_imports_it(tmp_path):
    code = """
from dataclasses import replace
from tiny import GPT2
from megapipe.distributed.axis import Axis
from megapipe.models.layer import TransformerLayer
for impl in ("local", "auto"):
    TransformerLayer(replace(GPT2, transformer_impl=impl), Axis(), 0)
print("built")
"""
    folder = package(tmp_path, "transformer_engine", "2.20.2", "raise SystemExit('imported')")
    assert run(code, folder) == ["built"]
