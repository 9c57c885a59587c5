"""Tables of families: what is written is what was read, for keys and tensors drawn for every table."""

from __future__ import annotations

import ast
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.config.layers import layer_config
from megapipe.convert.huggingface import keys, tables
from megapipe.convert.huggingface.families import FAMILIES, differing, from_huggingface
from megapipe.convert.huggingface.family import IGNORED, Family
from megapipe.convert.huggingface.layers import canonical, spread
from megapipe.convert.huggingface.mapping import rules
from megapipe.convert.huggingface.values import KIND_OF
from megapipe.convert.tensors import our_shapes
from megapipe.errors import CheckpointError

LINES_OF_A_FAMILY = 30
_FULL, _SLIDING, _LINEAR = ["full_attention"], ["sliding_attention"], ["linear_attention"]
_DRAWN = {
    "num_hidden_layers n_layer num_attention_heads n_head": [4],
    "hidden_size n_embd": [32],
    "max_position_embeddings n_positions": [16],
    "num_key_value_heads": [4, 2, 1],
    "head_dim": [6, 8],
    "n_inner ffn_hidden_size": [20, 24],
    "num_kv_heads": [4, 2],
    "num_ln_in_parallel_attn": [None],
    "parallel_attn": [True],
    "shared_intermediate_size": [0, 20],
    "q_lora_rank": [None, 12],
    "sliding_window": [3, 5],
    "max_window_layers": [0, 2, 4],
    "layer_types": [None, (_FULL + _SLIDING) * 2, _SLIDING * 4, _FULL * 4],
    "num_experts num_local_experts n_routed_experts moe_num_experts": [8],
    "num_experts_per_tok moe_k": [2, 4],
    "moe_layer_start_index": [0, 1],
    "moe_layer_end_index": [-1, 2],
    "moe_layer_interval": [1],
    "moe_norm_min": [1e-12],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [None, [0], [1, 2]],
    "mlp_layer_types": [None, ["dense", "sparse", "sparse", "dense"], ["sparse"] * 4],
    "first_k_dense_replace n_shared_experts num_shared_experts moe_num_shared_experts": [0, 1, 2],
    "n_group": [1, 4],
    "topk_group": [1],
    "topk_method": ["greedy", "group_limited_greedy"],
    "rope_theta rotary_emb_base": [1e4, 5e5],
    "partial_rotary_factor rotary_pct": [None, 1.0],
    "rope_scaling rope_parameters original_max_position_embeddings": [None],
    "no_rope_layers": [None, [1, 0, 1, 1]],
    "no_rope_layer_interval": [2, 3],
    "sliding_window_pattern": [2, 4],
    "rotary_dim": [2, 4],
    "linear_num_key_heads full_attention_interval": [2, 4],
    "linear_num_value_heads": [4, 8],
    "query_pre_attn_scalar": [4, 9, 256],
    "attn_logit_softcapping final_logit_softcapping": [None, 2.0],
    "rope_local_base_freq": [1e4, 100.0],
    "attention_chunk_size floor_scale": [3, 5],
    "interleave_moe_layer_step": [1, 2],
    "moe_layers": [None, [0, 2]],
    "per_layer_config": [None],
    "global_head_dim": [8],
    "num_global_key_value_heads": [None, 1],
}
VALUES = {key: values for names, values in _DRAWN.items() for key in names.split()}


def drawn(name: str, draw: random.Random) -> dict[str, object]:
    """A config.json of a family with every key of its table."""
    family = FAMILIES[name]
    content: dict[str, object] = {"model_type": name, "vocab_size": 40}
    for key, default in family.defaults.items():
        meaning = family.keys.get(key)
        if isinstance(meaning, keys.Equals):
            continue
        if isinstance(meaning, keys.Unread):
            content[key] = default
            continue
        if isinstance(meaning, keys.Only):
            content[key] = draw.choice(meaning.values)
        elif isinstance(meaning, keys.Choice):
            content[key] = draw.choice(list(meaning.values))
        elif getattr(meaning, "only", ()):
            content[key] = default
        elif key in VALUES:
            content[key] = draw.choice(VALUES[key])
        elif KIND_OF[key] is bool:
            content[key] = draw.random() < 0.5
        elif KIND_OF[key] is float:
            content[key] = draw.choice([0.125, 0.5])
        else:
            assert KIND_OF[key] is int, key
            content[key] = draw.choice([8, 12, 24])
    for key, meaning in family.keys.items():
        if isinstance(meaning, keys.Twin | keys.Equals):
            content |= meaning.write_last(key, content)
        if type(meaning).__name__ == "Renormalised":
            content[key] = True
        if type(meaning).__name__ == "DeltaLayers":
            content["layer_types"] = draw.choice([None, (_FULL + _LINEAR) * 2, _LINEAR * 4, _FULL * 4])
        if type(meaning).__name__ == "_ErfWithoutBiases" and not content[key]:
            content["hidden_act"] = "gelu"
        if type(meaning).__name__ == "_Layers":
            content["layer_types"] = draw.choice([None, ["chunked_attention", *_FULL] * 2])
        if type(meaning).__name__ == "_Heads":
            content["layer_types"] = draw.choice([None, (_SLIDING + _FULL) * 2])
        if getattr(meaning, "stated", False):
            content["layer_types"] = VALUES["layer_types"][1]
    return content


# scripts/nightly.sh draws eight and four of each family.
DRAWS, TENSORS = (8, 4) if os.environ.get("MEGAPIPE_NIGHTLY") else (2, 1)
CASES = [(name, seed) for name in FAMILIES for seed in range(DRAWS)]


@pytest.mark.parametrize("name, seed", CASES)
def test_a_config_json_that_is_written_means_what_the_one_that_was_read_means(name, seed):
    content = drawn(name, random.Random(f"{name}{seed}"))
    model = from_huggingface(content)
    family = FAMILIES[name]
    if family.is_sparse and not model.has_experts:
        return
    written = family.write(model) | {"model_type": name, "vocab_size": 40}
    assert differing(model, written, name) == []
    again = family.write(from_huggingface(written))
    assert again == {key: written[key] for key in again}
    # A key with one value for one meaning is the same key again.
    plain = [key for key, meaning in family.keys.items() if type(meaning) in (keys.Same, keys.Not)]
    same = {key for key in plain if content[key] is not None}
    assert {key: written[key] for key in same} == {key: content[key] for key in same}


@pytest.mark.parametrize("name, seed", [case for case in CASES if case[1] < TENSORS])
def test_tensors_that_are_split_and_joined_are_the_same_to_the_bit(name, seed):
    model = from_huggingface(drawn(name, random.Random(f"{name}{seed}")))
    depths = 1 if FAMILIES[name].published else None
    model = replace(model, padded_vocab_size=40, mtp_num_layers=depths)
    shapes = our_shapes(model)
    used: list[str] = []
    for rule in rules(model, name, 40):
        ours = torch.randn(shapes[rule.ours])
        theirs = [part.clone(memory_format=torch.contiguous_format) for part in rule.split(ours)]
        assert len(theirs) == len(rule.theirs)
        assert torch.equal(rule.join(theirs), ours), rule.ours
        again = rule.split(rule.join(theirs))
        assert all(torch.equal(a, b) for a, b in zip(again, theirs, strict=True)), rule.ours
        used += rule.theirs
    assert len(used) == len(set(used))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_no_table_knows_is_refused_by_name(name):
    content = drawn(name, random.Random(name))
    with pytest.raises(CheckpointError, match="mystery_factor is 2, and nothing here knows this key"):
        from_huggingface(content | {"mystery_factor": 2})
    assert from_huggingface(content | {"mystery_factor": None, "temperature": 0.7, "auto_map": {"a": "b"}})


def test_families_with_other_names_of_layers_have_none_for_depths():
    """An export looked for them under the names of a Llama."""
    without = {name for name, family in FAMILIES.items() if not family.has_depths}
    assert without == {"gpt2", "gpt_bigcode", "gpt_neox", "falcon"}


def test_no_key_decides_something_and_nothing():
    both = {name: family.defaults.keys() & IGNORED for name, family in FAMILIES.items()}
    assert {name: keys for name, keys in both.items() if keys} == {}


def test_a_family_is_at_most_30_lines():
    """Without what several begin from: gpt2, llama, and names with an underscore."""
    long: dict[str, int] = {}
    for path in Path(tables.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ".but(" in ast.unparse(node.value):
                lines = (node.end_lineno or 0) - node.lineno + 1
                name = ast.unparse(node.targets[0])
                if lines > LINES_OF_A_FAMILY and not name.startswith("_"):
                    long[name] = lines
    assert long == {}


def test_a_family_that_begins_from_another_adds_replaces_and_removes():
    kin = Family("A", "", {"a": keys.Same("hidden_size"), "b": keys.Only(1)}, {"x": 1, "y": 2}, {})
    other = kin.but("B", "", keys={"b": None, "c": keys.Not("z", True)}, always={"y": 3})
    assert list(other.keys) == ["a", "c"]
    assert other.always == {"x": 1, "y": 3}
    assert kin.always == {"x": 1, "y": 2}


def test_equal_models_have_the_same_overrides_however_they_are_written():
    content = drawn("qwen2", random.Random(1)) | {"use_sliding_window": True, "sliding_window": 4}
    content |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]}
    model = from_huggingface(content)
    assert model.window_size == "3,0"
    assert model.per_layer_overrides == '{"0": {"window_size": null}}'
    other = replace(
        model,
        window_size=None,
        per_layer_overrides='{"1": {"window_size": "3,0"}, "2-3": {"window_size": "3,0"}, "0": {}}',
    )
    assert canonical(other) == canonical(model) == model
    assert [layer_config(other, n).window for n in range(4)] == [None, 3, 3, 3]
    everywhere = replace(model, window_size=None, per_layer_overrides='{"0-3": {"window_size": "3,0"}}')
    assert canonical(everywhere) == replace(model, per_layer_overrides=None)


def test_of_as_many_layers_the_last_ones_are_the_rule():
    found = spread([{"window_size": "3,0"}, {"window_size": None}] * 2)
    assert found == {"window_size": None, "per_layer_overrides": '{"0,2": {"window_size": "3,0"}}'}


@pytest.mark.parametrize(
    "kinds, line",
    [
        (["full_attention"] * 3, "layer_types has 3 entries for 4 layers"),
        (["linear_attention"] * 4, "layer_types has linear_attention; only full_attention and sliding_attention"),
    ],
)
def test_kinds_of_layers_that_there_are_not_are_refused(kinds, line):
    content = drawn("qwen3", random.Random(1)) | {"use_sliding_window": True, "layer_types": kinds}
    with pytest.raises(CheckpointError, match=line):
        from_huggingface(content)


@pytest.mark.parametrize("name", ["cohere2", "exaone_moe", "gemma4_text"])
def test_a_window_of_null_is_refused_where_the_class_of_transformers_refuses_it(name):
    """A model without windows went out as an exaone_moe that transformers could not open."""
    content = drawn(name, random.Random(1)) | {"sliding_window": None}
    with pytest.raises(CheckpointError, match="sliding_window is null"):
        from_huggingface(content)
    # All layers of this family rotate, and none has a window.
    without = from_huggingface(drawn("hy_v3", random.Random(1)))
    assert FAMILIES[name].write(without).get("sliding_window", 4096) is not None
