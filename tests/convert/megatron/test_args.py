"""Settings in Megatron-LM's arguments: those that decide numbers come back, and a value of another type is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from random_models import refused
from tiny import LLAMA

from megapipe.checkpoint.resume import RULES, resume_problems
from megapipe.config import SECTION_OF, Config
from megapipe.config.notes import flag
from megapipe.convert.megatron.args import args_of, config_of
from megapipe.flags.megatron_flags import MEGATRON_FLAGS

RUN = Config(model=LLAMA).with_fields(micro_batch_size=1, global_batch_size=2, seq_length=8, train_iters=9, lr=0.1)
MEGATRON_HAS_IT_NOT = {name for name in RULES if SECTION_OF[name] == "model" and flag(name) not in MEGATRON_FLAGS}
EXPERTS = {name for name in RULES if name.startswith("moe_")}
OTHER_EXPERTS = {
    "moe_layer_freq": "[0, 1, 1, 1]",
    "no_rope_freq": "[0, 1, 1, 1]",
    "window_attn_skip_freq": "[0, 1, 1, 1]",
    "moe_aux_loss_coeff": (0.5,),
    "moe_router_load_balancing_type": ("seq_aux_loss",),
}
STATE_COMES_IN_AS_FLOAT32 = {
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
}
# There they act with --use-mup alone, and such a model is refused on its way there.
WITH_USE_MUP = {"mup_embedding_mult", "mup_output_mult"}
# Its layers of gated delta nets are refused in both directions.
REFUSED = {"experimental_attention_variant"}

CARRIED = {
    (SECTION_OF[name], name)
    for name, rule in RULES.items()
    if rule != "free" and name not in MEGATRON_HAS_IT_NOT | STATE_COMES_IN_AS_FLOAT32 | WITH_USE_MUP | REFUSED
}


def other_than(section: object, name: str) -> object:
    """A value that the field does not have by default."""
    kind, default = get_type_hints(type(section))[name], getattr(section, name)
    if name in OTHER_EXPERTS:
        return OTHER_EXPERTS[name]
    for literal in (kind, *get_args(kind)):
        if get_origin(literal) is Literal:
            return next(value for value in get_args(literal) if value != default)
    if get_origin(kind) is tuple:
        return (3, 3, 30) if kind == tuple[int, ...] else ("a", "b")
    if kind is bool:
        return not default
    if float in (kind, *get_args(kind)):
        return (default or 1.0) / 2
    return "5,0" if name == "window_size" else "constant" if str in (kind, *get_args(kind)) else (default or 1) * 2


@pytest.mark.parametrize("section, name", sorted(CARRIED))
def test_a_setting_that_decides_numbers_comes_back_from_megatrons_arguments(section, name):
    """Tokenizer and --vocab-size got lost, so that what had gone out and come in again needed flags to go on."""
    base = RUN.with_fields(num_experts=2) if name in EXPERTS else RUN
    want = replace(getattr(base, section), **{name: other_than(getattr(base, section), name)})
    if name == "step_batch_size_schedule":
        want = replace(want, global_batch_size=None)
    if name in ("start_weight_decay", "end_weight_decay"):
        want = replace(want, weight_decay_incr_style="linear")
    got = config_of(args_of(replace(base, **{section: want})), "it")
    if section != "model":
        assert getattr(getattr(got, section), name) == getattr(want, name)
    assert (
        resume_problems(vars(got.model), None, replace(base, model=want if section == "model" else base.model), "it")
        == []
    )


def test_arguments_of_another_type_are_named():
    args = args_of(RUN) | {
        "lr": "fast",
        "ffn_hidden_size": 2.5,
        "rampup_batch_size": ["a"],
    }
    assert refused(lambda: config_of(args, "it")) == (
        "it: its argument ffn_hidden_size is an integer, got 2.5",
        'it: its argument rampup_batch_size is a list, each an integer, got ["a"]',
        'it: its argument lr is a finite number, got "fast"',
    )


def test_openai_gelu_chooses_no_form():
    """Megatron-LM reads the flag nowhere: --bias-gelu-fusion is the tanh form, without it GELU is erf."""
    args = args_of(RUN.with_fields(swiglu=False, disable_bias_linear=False))
    assert not config_of(args | {"bias_gelu_fusion": True, "openai_gelu": False}, "it").model.erf_gelu
    assert config_of(args | {"bias_gelu_fusion": False, "openai_gelu": True}, "it").model.erf_gelu


@pytest.mark.parametrize(
    "name, value", [("softmax_scale", 0.5), ("rotary_base_per_layer", [1e4, 1e6]), ("head_wise_attn_gate", True)]
)
def test_another_attention_is_refused(name, value):
    """Settings of newer versions of Megatron-LM."""
    args = args_of(RUN) | {name: value}
    assert refused(lambda: config_of(args, "it")) == (f"it: --{name.replace('_', '-')} {value} is not supported",)


def test_experts_of_few_devices_alone_are_refused():
    """core_v0.9 to 0.11 said so what --moe-router-group-topk is now; the choice went to all experts."""
    args = args_of(RUN) | {"num_experts": 8, "moe_router_topk_limited_devices": 2}
    assert refused(lambda: config_of(args, "it")) == ("it: --moe-router-topk-limited-devices 2 is not supported",)
