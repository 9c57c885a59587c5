"""A family of Hugging Face models as a table: keys of its config.json, and names of its tensors.

A table is data. Each entry is written once and read in both directions; a family may begin from
another one, its kin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapipe.config import ModelConfig
from megapipe.config.typed import shown
from megapipe.convert.huggingface.experts import settled
from megapipe.convert.huggingface.keys import LAYERS, NEEDED, Fields, Json, Meaning
from megapipe.convert.huggingface.layers import spread
from megapipe.convert.huggingface.layouts import Layout

# Keys of a config.json that decide nothing about the model: who wrote it and how, special tokens,
# defaults of text generation, other heads than the language model's, and settings of a training.
_IGNORED = """
    model_type architectures transformers_version torch_dtype dtype _name_or_path auto_map
    _attn_implementation _attn_implementation_autoset attn_implementation use_flash_attn
    unsloth_version unsloth_fixed vocab_size bos_token_id eos_token_id pad_token_id sep_token_id
    unk_token_id decoder_start_token_id prefix tokenizer_class task_specific_params use_cache
    return_dict return_dict_in_generate torchscript output_attentions output_hidden_states
    output_scores output_router_logits use_return_dict use_bfloat16 tf_legacy_loss pruned_heads
    tie_encoder_decoder is_encoder_decoder is_decoder cross_attention_hidden_size
    chunk_size_feed_forward finetuning_task id2label label2id num_labels problem_type
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id pretraining_tp gradient_checkpointing initializer_range
    embedding_initializer_range router_aux_loss_coef aux_loss_alpha seq_aux ep_size n_ctx
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    inference_runner max_batch_size max_sequence_length pad_key_length
    pre_allocate_kv_cache validate_runner_input reorder_and_upcast_attn model_max_length
    base_model_tp_plan quantization_config
"""
_KIND = "position_embedding_type"
IGNORED = frozenset(_IGNORED.split())


@dataclass(frozen=True)
class Family:
    """A table that converts one model_type of Hugging Face: its config.json and its tensors.

    `read` turns a config.json into fields of ModelConfig, and `write` does the inverse. `filled`
    and `unknown` prepare and check a config.json for `read`. `but` makes the table of a similar
    family.

    `is_sparse`, `is_latent` and `has_depths` say whether the family's models may have experts,
    latent attention and multi-token prediction.

    Attributes:
        architecture: the class of transformers, as config.json names it.
        what: how the family differs from others, for `megapipe convert --list`.
        keys: {key of config.json: its Meaning}. A Meaning may read further keys.
        always: fields of ModelConfig that all models of the family have. A key may set them, too.
        names: megapipe's module or tensor -> a Layout with Hugging Face's names and an operation.
        layer: the prefix of Hugging Face's names within a layer.
        published: numbers of layers, such as (61,), of the models whose multi-token prediction
            transformers knows.
        computed_as: the model_type whose code in transformers computes this family; "" for its own.
        aliases: another name of a key -> the key, as transformers reads them.
        defaults: each key that the table knows -> the value that transformers assumes without it.
    """

    architecture: str
    what: str
    keys: Mapping[str, Meaning]
    always: Mapping[str, Any]
    names: Mapping[str, Layout]
    layer: str = "model.layers.{n}."
    published: tuple[int, ...] = ()
    computed_as: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Fields = field(init=False)

    def __post_init__(self) -> None:
        defaults: Fields = {}
        for key, meaning in self.keys.items():
            defaults |= meaning.keys(key)
        object.__setattr__(self, "defaults", defaults)

    def but(
        self,
        architecture: str,
        what: str,
        keys: Mapping[str, Meaning | None] | None = None,
        always: Mapping[str, Any] | None = None,
        names: Mapping[str, Layout | None] | None = None,
        **changes: Any,
    ) -> Family:
        """Return the table of a similar family, with the differences that the arguments give.

        Args:
            architecture, what: the attributes of the new table.
            keys, always, names: entries that are added to this table's entries, or replace them. An
                entry of None removes that entry.
            changes: new values of the other attributes.
        """
        merged: dict[str, Any] = {}
        # The order of the kin's keys stays, so that files of one kind look the same.
        for attribute, more in (("keys", keys), ("always", always), ("names", names)):
            both = {**getattr(self, attribute), **(more or {})}
            merged[attribute] = {name: x for name, x in both.items() if x is not None}
        return replace(self, architecture=architecture, what=what, **merged, **changes)

    @property
    def is_sparse(self) -> bool:
        """Return whether the family's models may have experts."""
        return not self.defaults.keys().isdisjoint(("num_experts_per_tok", "moe_k"))

    @property
    def has_depths(self) -> bool:
        """Return whether the family's models may have modules of multi-token prediction."""
        # `depths.depths_in` and `depths.copies` ask for them under this name.
        return "eh_proj" in self.names and self.layer == "model.layers.{n}."

    @property
    def is_latent(self) -> bool:
        """Return whether the family's models have multi-head latent attention."""
        return "kv_lora_rank" in self.defaults

    def filled(self, content: Json) -> Fields:
        """Return a config.json with the family's default for each key that it leaves out.

        Args:
            content: the config.json.
        """
        # A file's null stays: it may mean something else than a missing key.
        filled = {key: value for key, value in self.defaults.items() if value is not NEEDED}
        filled |= content
        for alias, key in self.aliases.items():
            if alias in content and key not in content:
                filled[key] = content[alias]
        return filled

    def unknown(self, content: Json) -> Iterator[str]:
        """Yield a text for each key of a config.json that the table does not know.

        A key with the value null passes.

        Args:
            content: the config.json.
        """
        # A key that changes the model and is not read makes it another model, without any error.
        for key, value in content.items():
            known = key in self.defaults or key in self.aliases or key in IGNORED
            if value is not None and not known:
                yield (
                    f"{key} is {shown(value)}, and nothing here knows this key. "
                    "Leave it out if it does not change the model"
                )

    def read(self, content: Json, problems: list[str]) -> Fields:
        """Return the fields of ModelConfig that a config.json means.

        Args:
            content: a config.json to which `filled` has added the defaults of missing keys.
            problems: receives a text for each value that ModelConfig cannot express.
        Raises: KeyError for a missing key that has no default.
        """
        fields = dict(self.always)
        # Several keys may differ between layers. Each gives a dictionary for every layer.
        lists: list[list[Fields]] = []
        for key, meaning in self.keys.items():
            found = meaning.read(key, content, problems)
            if LAYERS in found:
                lists.append(found.pop(LAYERS))
            fields |= found
        # With problems the lists may have other lengths.
        if lists and not problems:
            layers: list[Fields] = [{} for _ in lists[0]]
            for settings in lists:
                for layer, more in zip(layers, settings, strict=True):
                    layer |= more
            # A list of layers with a rotation says not which one.
            if fields.get(_KIND) == "yarn":
                for layer in layers:
                    if layer.get(_KIND) == "rope":
                        layer[_KIND] = "yarn"
            fields |= spread(layers)
        # GELU has its erf form without biases anyway.
        if fields.get("disable_bias_linear"):
            fields.pop("no_bias_gelu_fusion", None)
        return settled(fields)

    def write(self, model: ModelConfig) -> Fields:
        """Return the keys of a config.json of this model.

        A family that cannot express the model returns keys of another model. So read the keys
        again, and compare.
        """
        content: Fields = {"architectures": [self.architecture]}
        # Two rounds: a key that follows from others is written after them.
        for key, meaning in self.keys.items():
            content |= meaning.write(key, model)
        for key, meaning in self.keys.items():
            content |= meaning.write_last(key, content)
        return content
