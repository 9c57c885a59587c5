"""Models of a user's own: named on the command line, Megatron's signature, the example of the docs, the ready test."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from programs import ROOT, run_ranks
from tiny import GPT2, LLAMA
from torch import nn

from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, layout_of, set_layout
from megapipe.errors import ConfigError
from megapipe.models.build import stage_module
from megapipe.models.gpt import GPTModel
from megapipe.models.provider import find_provider, gpt_provider, stage_provider
from megapipe.partition.spans import LayerSpan
from megapipe.testing import check_provider

PAGE = (ROOT / "docs" / "model_provider.md").read_text()
(TEST,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLE = ROOT / "examples" / "own_provider.py"


def test_the_example_trains_under_zb_v_with_the_command_of_the_docs(tmp_path):
    (command,) = re.findall(r"```\n(torchrun [^`]* --eval-iters 0)\n```", PAGE)
    flags = command.replace("\\\n", " ").replace("examples/own_provider.py", str(EXAMPLE)).split()[3:]
    assert flags[0] == "pretrain_gpt.py"
    output = run_ranks(2, [ROOT / flags[0], *flags[1:]], cwd=tmp_path)
    losses = [float(x) for x in re.findall(r"lm loss: (\S+)", output)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_the_test_of_the_docs_passes():
    scope: dict[str, object] = {}
    exec(TEST, scope)
    scope["test_gated_conv"]()  # type: ignore[operator]


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_our_own_provider_passes(config):
    check_provider(gpt_provider, config, schedules=["1f1b", "zb-v", "dualpipe"])


@pytest.mark.parametrize(
    "config",
    [replace(LLAMA, qk_layernorm=True), replace(GPT2, qk_layernorm=True, sequence_parallel=True)],
    ids=["of heads", "of heads and norms, with biases"],
)
def test_weights_of_which_a_tensor_parallel_rank_sees_a_part_pass(config):
    """They were called wrong: what the optimizer adds up after the backward was compared before it."""
    check_provider(gpt_provider, config, schedules=["1f1b"], tensor_parallel=2)


def test_a_weight_that_lacks_the_sum_over_tensor_parallel_ranks_is_found():
    def model_provider(config, span, tp):
        model = GPTModel(config, span, tp)
        for param in (p for name, p in model.named_parameters() if "q_layernorm" in name):
            set_layout(param, replace(layout_of(param), sum_over_tp=False))
        return model

    wrong = (
        r"0\.self_attention\.q_layernorm\.weight lacks a sum over tensor-parallel ranks: Layout\(\.\.\., sum_over_tp="
    )
    with pytest.raises(AssertionError, match=wrong):
        check_provider(model_provider, replace(GPT2, qk_layernorm=True), schedules=["1f1b"], tensor_parallel=2)


def test_megatrons_signature_is_accepted_as_it_is():
    def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, *, span, tp):
        assert (pre_process, post_process) == (span.embedding, span.loss)
        return GPTModel(config, span, tp)

    check_provider(model_provider, GPT2, schedules=["interleaved", "zb-v"])


def test_vp_stage_counts_the_stages_of_a_rank():
    def model_provider(pre_process, post_process, vp_stage=None):
        return pre_process, post_process, vp_stage

    first, last = LayerSpan(0, 1, True, False), LayerSpan(3, 1, False, True)
    build = stage_provider(model_provider, [first, last])
    assert build(GPT2, first, Axis()) == (True, False, 0)
    assert build(GPT2, last, Axis()) == (False, True, 1)
    assert stage_provider(model_provider, [first])(GPT2, first, Axis()) == (True, False, None)


def test_a_stage_that_forgets_its_place_is_found():
    class Shifted(GPTModel):
        """Scales its input by numbers that depend on where the model is cut."""

        def set_input_tensor(self, x):
            super().set_input_tensor(None if x is None else x * torch.linspace(1, 1 + self.span.first, x.shape[-1]))

    with pytest.raises(AssertionError, match="1f1b: losses are "):
        check_provider(Shifted, GPT2, schedules=["1f1b"])


def test_a_weight_of_no_layout_starts_by_name_and_seed():
    """It started otherwise on each rank and at each start, silently: what the provider draws is drawn anew."""

    def model_provider(config, span, tp):
        model = GPTModel(config, span, tp)
        if span.loss:
            model.scale = nn.Parameter(torch.randn(1))
        return model

    check_provider(model_provider, GPT2, schedules=["1f1b"])


def test_a_parameter_named_by_its_place_in_the_stage_is_found():
    def model_provider(config, span, tp):
        model = GPTModel(config, span, tp)
        if not span.embedding:
            model.extra = set_layout(nn.Parameter(torch.empty(1)), Layout((1,)))
        return model

    with pytest.raises(AssertionError, match="extra is no parameter of the whole model"):
        check_provider(model_provider, GPT2, schedules=["1f1b"])


@pytest.mark.parametrize(
    "name, text",
    [
        ("my_model", "my_model is not MODULE:NAME, such as my_model:provider or path/my_model.py:provider"),
        (
            "no.such.module:provider",
            "no.such.module:provider: cannot import no.such.module: No module named 'no'. "
            "The file can be named too: --model-provider path/to/no/such/module.py:provider",
        ),
        (
            "megapipe.models.gpt:GPTModell",
            "megapipe.models.gpt:GPTModell: megapipe.models.gpt has no function GPTModell; did you mean GPTModel?",
        ),
        (
            "megapipe.models.moe.dispatch:summed",
            "megapipe.models.moe.dispatch:summed takes (rows: 'Tensor', of: 'Rows') -> 'Tensor', but a "
            "provider takes (config, span, tp) or (pre_process, post_process, vp_stage=None)",
        ),
    ],
)
def test_a_name_that_is_no_provider_is_one_line(name, text):
    with pytest.raises(ConfigError) as caught:
        find_provider(name)
    assert caught.value.problems == (f"--model-provider {text}",)


def test_a_file_and_a_module_are_found(monkeypatch):
    assert find_provider(f"{EXAMPLE}:provider").__name__ == "provider"
    monkeypatch.chdir(EXAMPLE.parent)
    assert find_provider("own_provider:provider").__name__ == "provider"
    with pytest.raises(ConfigError, match=r"cannot import nothing\.py"):
        find_provider("nothing.py:provider")


@pytest.mark.parametrize(
    "section, given, text",
    [
        ("model", {"compile": True}, "--compile compiles the layers of megapipe"),
        ("parallel", {"offload_modules": ("core_attn",)}, "--offload-modules core_attn names layers of megapipe"),
    ],
)
def test_what_is_of_our_layers_is_refused_for_others(section, given, text):
    config, span = Config(model=GPT2), LayerSpan(0, 1, True, True)
    config = replace(config, **{section: replace(getattr(config, section), **given)})
    with pytest.raises(ConfigError, match=f"^{text}, and this model has others. Leave it out.$"):
        stage_module(config, lambda *_: nn.Linear(2, 2), span, Axis())
