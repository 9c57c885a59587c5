"""GPT-2: LayerNorm, GELU, learned positions, and biases everywhere."""

from __future__ import annotations

from megapipe.convert.huggingface.family import Family
from megapipe.convert.huggingface.keys import Choice, Not, Only, Same, Twin
from megapipe.convert.huggingface.layouts import Layout, Turned, TurnedRows

# Radford et al. 2019. The class drops 0.1 everywhere, unless a file says another rate.
# null for n_inner is four times the hidden size, as in all published sizes.
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    what="every size, tied or not, also the oldest files without transformer. in their names",
    keys={
        "n_layer": Same("num_layers"),
        "n_embd": Same("hidden_size"),
        "n_head": Same("num_attention_heads"),
        "n_inner": Same("ffn_hidden_size", None, null=lambda content: 4 * content["n_embd"]),
        "n_positions": Same("max_position_embeddings"),
        "activation_function": Choice(
            "no_bias_gelu_fusion",
            {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu": True},
            "gelu_new",
        ),
        "layer_norm_epsilon": Same("norm_epsilon", 1e-5),
        "attn_pdrop": Same("attention_dropout", 0.1),
        "resid_pdrop": Same("hidden_dropout", 0.1),
        "embd_pdrop": Twin("resid_pdrop", 0.1, "--hidden-dropout is both"),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", True),
        "scale_attn_weights": Only(True, silent=True),
        "scale_attn_by_inverse_layer_idx": Only(False, silent=True),
        "add_cross_attention": Only(False, silent=True),
    },
    always={},
    names={
        "embedding.word_embeddings": Layout("transformer.wte"),
        "embedding.position_embeddings": Layout("transformer.wpe"),
        "decoder.final_layernorm": Layout("transformer.ln_f"),
        "output_layer": Layout("lm_head"),
        "input_layernorm": Layout("ln_1"),
        # GPT-2's own linear layers keep weights as [in, out].
        "self_attention.linear_qkv": TurnedRows("attn.c_attn"),
        "self_attention.linear_proj": Turned("attn.c_proj"),
        "pre_mlp_layernorm": Layout("ln_2"),
        "mlp.linear_fc1": Turned("mlp.c_fc"),
        "mlp.linear_fc2": Turned("mlp.c_proj"),
    },
    layer="transformer.h.{n}.",
)
