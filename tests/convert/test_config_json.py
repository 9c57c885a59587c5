"""config.json: nothing in it is dropped that makes another model, and nothing that a file may hold is a traceback."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace

import pytest
from random_models import refused, saved, transformers
from tiny import GPT2, LLAMA

from megapipe.config import ModelConfig
from megapipe.convert import import_checkpoint
from megapipe.convert.huggingface.checks import notes
from megapipe.convert.huggingface.families import FAMILIES, from_huggingface, to_huggingface
from megapipe.convert.huggingface.keys import Unread
from megapipe.errors import CheckpointError

_NO_MODEL = (
    "transformers_version architectures output_hidden_states return_dict dtype chunk_size_feed_forward id2label "
    "label2id is_encoder_decoder problem_type initializer_range use_cache bos_token_id eos_token_id pad_token_id "
    "_name_or_path output_attentions pretraining_tp is_decoder "
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
)
DECIDES_NOTHING = {
    *_NO_MODEL.split(),
    "reorder_and_upcast_attn",  # of the same sums
    "max_window_layers",  # where layer_types stands beside it
    "sliding_window_pattern",  # the same
    "original_max_position_embeddings",  # of positions that are not stretched
    "no_rope_layer_interval",  # where no_rope_layers stands beside it
    "vocab_size",  # which tensors and padding say
    "output_router_logits",  # which a training asks for
    "num_nextn_predict_layers",  # whose layers are left out, as transformers leaves them
    "embedding_initializer_range",
    "router_aux_loss_coef",  # of a training, see docs/huggingface.md
}

DEPTHS = "config.json speaks of layers of multi-token prediction, and there are none"
LATENT = replace(LLAMA, multi_latent_attention=True)


def another(value: object) -> object:
    """As a file could have it instead."""
    if isinstance(value, list):
        return ["sliding_attention" if value[:1] == ["full_attention"] else "full_attention", *value[1:]]
    if isinstance(value, dict):
        return value | {"partial_rotary_factor": 0.75}
    if isinstance(value, str):
        return "relu"
    return not value if isinstance(value, bool) else (value or 16) * 2  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_that_makes_another_model_is_taken_or_refused(family):
    """embd_pdrop was dropped: a GPT-2 with 0.3 came in with the rate of resid_pdrop."""
    config = transformers.AutoConfig.for_model(FAMILIES[family].computed_as or family)
    given = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0} if "qwen" in family else {}
    if family == "qwen2_moe":  # by its own rule no layer would have one
        given["layer_types"] = ["sliding_attention"] * config.num_hidden_layers
    if "linear_num_key_heads" in FAMILIES[family].defaults:  # without windows
        given = {}
    if family == "falcon":  # without groups their number decides nothing
        given = {"new_decoder_architecture": True, "num_kv_heads": 8, "hidden_size": 64, "num_attention_heads": 16}
    if family == "ernie4_5_moe":  # twice the default is beyond the last layer too
        given = {"moe_layer_end_index": 3}
    if family == "dots1":
        given = {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "norm_topk_prob": True}
        given["max_window_layers"] = 0
    if family == "deepseek_v2":  # whose default names no number of experts
        groups = {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}
        given = groups | {"topk_method": "group_limited_greedy"}
    if family == "gemma4_text":  # without inputs of each layer
        given = {"hidden_size_per_layer_input": 0}
    content = type(config)(**given).to_dict() | {"model_type": family}
    want, silent = from_huggingface(content), []
    unread = {key for key, meaning in FAMILIES[family].keys.items() if isinstance(meaning, Unread)}
    if family == "falcon":  # the older architecture's
        unread.add("multi_query")
    if "moe_layers" in content:
        unread.add("interleave_moe_layer_step")
    if "mlp_layer_types" in content:
        unread.add("first_k_dense_replace")
    for key in content.keys() - DECIDES_NOTHING - unread:
        try:
            if from_huggingface(content | {key: another(content[key])}) == want:
                silent.append(key)
        except CheckpointError:
            pass
    assert silent == []


@pytest.mark.parametrize(
    "change, line",
    [
        ({"hidden_size": "48"}, 'hidden_size is an integer, got "48"'),
        ({"num_hidden_layers": None}, "num_hidden_layers is an integer, got null"),
        ({"num_attention_heads": 0}, "num_attention_heads is an integer from 1 to 524288, got 0"),
        ({"rope_parameters": [1]}, "rope_parameters is an object, got [1]"),
        ({"rope_parameters": {"rope_theta": "a"}}, 'rope_parameters.rope_theta is a finite number, got "a"'),
        (
            {"model_type": ["llama"]},
            f'model_type ["llama"] is none of {", ".join(FAMILIES)}. By its keys llama is the nearest family',
        ),
        (
            {"model_type": "olmo"},
            "model_type olmo cannot be converted: there is nothing here for LayerNorm without a weight. "
            "The nearest family is llama",
        ),
    ],
)
def test_a_value_that_is_none_is_named(change, line):
    content = transformers.AutoConfig.for_model("llama").to_dict() | change
    assert refused(lambda: from_huggingface(content)) == (f"config.json: {line}",)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8},
            "enable_moe_block is True, and there is nothing here for MLP and experts in one layer, with own norms",
        ),
        (
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input is 256, and there is nothing here for an input of each layer by itself",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 15},
            "the last layer's layer_types is sliding_attention; only full_attention is computed",
        ),
    ],
)
def test_other_gemmas_are_refused_in_one_line(change, line):
    content = transformers.AutoConfig.for_model("gemma4_text", hidden_size_per_layer_input=0).to_dict() | change
    assert refused(lambda: from_huggingface(content)) == (f"config.json: {line}",)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-5])
def test_norms_of_latents_have_an_epsilon_of_their_own(family, epsilon):
    """transformers gives them 1e-6, whatever config.json says of the others."""
    content = transformers.AutoConfig.for_model(family, num_experts_per_tok=6, rms_norm_eps=epsilon).to_dict()
    model = from_huggingface(content)
    assert model.norm_epsilon == epsilon
    assert (model.latent_norm_epsilon or model.norm_epsilon) == 1e-6
    assert to_huggingface(model, 64)["rms_norm_eps"] == epsilon


@pytest.mark.parametrize(
    "family, given",
    [
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"activation_function": "gelu_new"}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
        ("llama", {"rope_theta": 1e4}),
        ("mixtral", {"router_jitter_noise": 0.0}),
        ("mixtral", {"router_jitter_noise": 0.1}),
    ],
)
def test_a_setting_goes_out_in_the_words_in_which_it_came_in(family, given):
    content = transformers.AutoConfig.for_model(family).to_dict() | given
    written = to_huggingface(from_huggingface(content), 64)
    assert {name: written[name] for name in given} == given


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_deepseeks_own_program_finds_a_rope_scaling_only_where_there_is_one(family):
    """It takes plain rope for null, and reads the factor of anything else."""
    content = transformers.AutoConfig.for_model(family, num_experts_per_tok=6).to_dict()
    plain = {"rope_type": "default", "rope_theta": 1e4}
    written = to_huggingface(from_huggingface(content | {"rope_parameters": plain}), 64)
    assert (written["rope_scaling"], written["rope_parameters"], written["rope_theta"]) == (None, plain, 1e4)
    yarn = plain | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    assert to_huggingface(from_huggingface(content | {"rope_parameters": yarn}), 64)["rope_scaling"]["factor"] == 8.0


@pytest.mark.parametrize("given, scale", [({}, 0.0), ({"mscale": 0.7, "mscale_all_dim": 0.7}, 0.7)])
def test_yarn_scales_the_scores_only_where_the_file_says_so(given, scale):
    """transformers leaves the softmax as it is without mscale_all_dim."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096}
    content = transformers.AutoConfig.for_model("deepseek_v3").to_dict() | {"rope_parameters": yarn | given}
    assert from_huggingface(content).mscale_all_dim == scale


def test_the_groups_of_deepseek_v2_count_by_their_best_expert():
    """6 experts of 3 groups: Megatron-LM's rule would have them count by 6 / 3."""
    groups = {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}
    content = transformers.AutoConfig.for_model("deepseek_v2", **groups, topk_method="group_limited_greedy").to_dict()
    model = from_huggingface(content)
    assert (model.moe_router_group_score_topk, model.moe_router_num_groups, model.moe_router_group_topk) == (1, 8, 3)
    assert from_huggingface(content | {"topk_method": "greedy"}).moe_router_group_topk is None


def test_no_config_json_and_no_index_of_weights_is_a_traceback(tmp_path):
    saved("qwen2", 0, tmp_path / "hf")
    path, index = tmp_path / "hf" / "config.json", tmp_path / "hf" / "model.safetensors.index.json"
    sound, draw = json.loads(path.read_text()), random.Random(1)
    odd = [None, 0, -1, 3, 2**62, 1.5, float("nan"), "x", [], ["a"], {}, {"a": 1}, True, {"rope_type": []}]
    for n in range(1000):
        content = sound | {draw.choice(list(sound)): draw.choice(odd)}
        with contextlib.suppress(CheckpointError):
            from_huggingface(content)
            if n % 50 == 0:  # as far as the tensors
                path.write_text(json.dumps(content))
                import_checkpoint(tmp_path / "hf", tmp_path / str(n))
    path.write_text(json.dumps(sound))
    for text in ("[]", '{"weight_map": ', '{"weight_map": [1]}', "[" * 100_000):
        index.write_text(text)
        assert refused(lambda: import_checkpoint(tmp_path / "hf", tmp_path / "ours"))[0].startswith(
            f"{index} is damaged"
        )


def said(model: ModelConfig, **content: object) -> str:
    return "\n".join(notes(content, model, model.padded_vocab_size or 0))


@pytest.mark.parametrize("erf, form", [(True, "erf form of GELU"), (False, "tanh form of GELU")])
def test_a_gelu_is_named_with_its_form(erf, form):
    model = replace(GPT2, no_bias_gelu_fusion=erf)
    assert f"activation gelu is the {form}" in said(model, activation_function="gelu")


def test_the_base_of_rotated_positions_is_said_where_there_are_any():
    assert "rope base is 10000; the halves of a head are rotated" in said(LLAMA)
    assert "rope" not in said(GPT2)


@pytest.mark.parametrize("spoken, depths, noted", [(1, None, True), (0, None, False), (1, 1, False)])
def test_depths_that_are_spoken_of_and_not_there_are_noted(spoken, depths, noted):
    model = replace(LLAMA, mtp_num_layers=depths)
    assert (DEPTHS in said(model, num_nextn_predict_layers=spoken)) == noted


@pytest.mark.parametrize("model, noted", [(LLAMA, True), (LATENT, False)], ids=["heads", "latent"])
def test_heads_that_do_not_add_up_to_the_hidden_size_are_noted(model, noted):
    wide = replace(model, kv_channels=2 * model.hidden // model.heads)
    assert ("do not add up to the hidden size" in said(wide)) == noted
