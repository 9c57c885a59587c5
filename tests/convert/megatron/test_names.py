"""Keys of `torch_dist`, written by hand from what Megatron-LM's layers are called."""

from __future__ import annotations

import pytest

from megapipe.convert.megatron.names import stored_names

QKV = "self_attention.linear_qkv.layer_norm_weight"
Q_UP = "self_attention.linear_q_up_proj.layer_norm_weight"


@pytest.mark.parametrize(
    "name, sparse, latent, keys",
    [
        ("input_layernorm.weight", False, False, [QKV]),
        ("input_layernorm.weight", False, True, [QKV, "input_layernorm.weight"]),
        ("pre_mlp_layernorm.weight", False, False, ["mlp.linear_fc1.layer_norm_weight"]),
        ("pre_mlp_layernorm.weight", True, False, ["mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"]),
        # A norm of the heads' queries stays where it is; that of a latent stands in the layer which reads it.
        ("self_attention.q_layernorm.weight", False, False, ["self_attention.q_layernorm.weight"]),
        ("self_attention.q_layernorm.weight", False, True, [Q_UP, "self_attention.q_layernorm.weight"]),
        ("mlp.experts.linear_fc1.weight", True, False, ["mlp.experts.experts.linear_fc1.weight"]),
        ("mlp.shared_experts.linear_fc1.weight", True, False, ["mlp.shared_experts.linear_fc1.weight"]),
    ],
)
def test_a_parameter_has_the_key_of_either_kind_of_layers(name, sparse, latent, keys):
    assert stored_names(name, sparse, latent) == keys
