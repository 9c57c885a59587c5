"""Experts in a config.json: which layers have them, how they are chosen, and shared ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import NEEDED, Fields, Json, Meaning, Same
from megapipe.convert.huggingface.values import expected

# A weight divided by itself is 1. Megatron-LM leaves a single one as it is.
_ALONE = "here the weight of one expert is its sigmoid. It cannot be converted"
_DENSE = "dense"
_SPARSE = "sparse"


def settled(fields: Fields) -> Fields:
    """Return `fields` with the fields of experts in the form that ModelConfig has.

    The list moe_layer_freq becomes a text, such as "1" if all layers have experts. If none has, all
    fields of experts are left out. A softmax router of a single expert gets moe_router_pre_softmax.

    Args:
        fields: fields as the keys of a config.json give them. moe_layer_freq, if given, is a list
            with a 1 for each layer with experts and a 0 for each other one.
    """
    # A model without any layer of experts is dense: its flags of experts would have no effect.
    sparse = fields.get("moe_layer_freq")
    if sparse is not None:
        if not any(sparse):
            return {
                name: value
                for name, value in fields.items()
                if name != "num_experts" and not name.startswith("moe_")
            }
        fields = fields | {"moe_layer_freq": "1" if all(sparse) else str(sparse)}
    # The weight of a single expert is 1 both ways, and no run accepts the other one.
    if fields.get("num_experts") == 1 and "moe_router_score_function" not in fields:
        fields = fields | {"moe_router_pre_softmax": True}
    return fields


def _sparse(model: ModelConfig) -> list[bool]:
    return [model.has_experts_in(layer) for layer in range(model.layers)]


@dataclass(frozen=True)
class DenseFirst(Meaning):
    """A config.json key with the number of dense layers before the first one with experts.

    Attributes:
        default: the value that transformers assumes for a missing key; NEEDED if it must be there.
    """

    default: Any = NEEDED

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        dense = content[key]
        layers = content["num_hidden_layers"]
        return {"moe_layer_freq": [int(layer >= dense) for layer in range(layers)]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: _sparse(model).index(True)}


@dataclass(frozen=True)
class MlpTypes(Meaning):
    """A config.json key with a list of "dense" and "sparse", one for each layer.

    Attributes:
        dense: name of another key, which counts the dense layers at the beginning. This other key
            is read if the list is missing. None: the family has no such key, and if the list is
            missing, only the first layer is dense.
    """

    dense: str | None = None

    def keys(self, key: str) -> Fields:
        return {key: None} if self.dense is None else {key: None, self.dense: 1}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        layers = content["num_hidden_layers"]
        kinds = content[key]
        if kinds is None:
            first = 1 if self.dense is None else content[self.dense]
            return {"moe_layer_freq": [int(layer >= first) for layer in range(layers)]}
        others = {str(kind) for kind in kinds if kind not in (_DENSE, _SPARSE)}
        if others or len(kinds) < layers:
            problems.append(f"{key} is a list of {_DENSE} or {_SPARSE} for {layers} layers")
        return {"moe_layer_freq": [int(kind == _SPARSE) for kind in kinds[:layers]]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        sparse = _sparse(model)
        written: Fields = {key: [_SPARSE if has else _DENSE for has in sparse]}
        return written if self.dense is None else written | {self.dense: sparse.index(True)}


class LayerRange(Meaning):
    """The meaning of ERNIE's key with the first layer that has experts, counted from 0.

    moe_layer_end_index is the last such layer, and -1 the model's last. moe_layer_interval is n:
    from the first to the last, the layers with experts are multiples of n, counted from 1.
    """

    def keys(self, key: str) -> Fields:
        return {key: 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        layers = content["num_hidden_layers"]
        names = (key, "moe_layer_end_index", "moe_layer_interval")
        first, last, step = (content[name] for name in names)
        if not all(type(content[name]) is int for name in names) or step < 1 or last < -1:
            problems.append(f"{', '.join(names)} are integers, got {first}, {last}, {step}")
            return {}
        if last == -1:
            last = layers - 1
        chosen = range(max(first, 0), last + 1)
        sparse = [layer in chosen and (layer + 1) % step == 0 for layer in range(layers)]
        return {"moe_layer_freq": [int(has) for has in sparse]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        sparse = _sparse(model)
        numbers = [layer for layer, has in enumerate(sparse) if has]
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        return {
            key: numbers[0],
            "moe_layer_end_index": numbers[-1],
            "moe_layer_interval": step,
        }


class SparseStep(Meaning):
    """The meaning of Qwen's key with a step n: every n-th layer has experts.

    With n = 2 these are the second, the fourth and so on. Layers in mlp_only_layers have none.
    """

    def keys(self, key: str) -> Fields:
        return {key: 1, "mlp_only_layers": None}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        layers = content["num_hidden_layers"]
        dense = content["mlp_only_layers"] or []
        if not all(type(layer) is int for layer in dense):
            problems.append(f"mlp_only_layers is a list of integers, got {dense}")
        # Counted from 1: with a step of 2 the first layer is dense.
        sparse = [layer not in dense and (layer + 1) % content[key] == 0 for layer in range(layers)]
        return {"moe_layer_freq": [int(has) for has in sparse]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        dense = [layer for layer, has in enumerate(_sparse(model)) if not has]
        return {key: 1, "mlp_only_layers": dense}


@dataclass(frozen=True)
class SparseList(Meaning):
    """A config.json key with the numbers of the layers that have experts, counted from 0.

    Attributes:
        step: name of another key, with n: if the list is missing, every n-th layer has experts.
    """

    step: str

    def keys(self, key: str) -> Fields:
        return {key: None, self.step: 1}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        layers = content["num_hidden_layers"]
        step = content[self.step]
        sparse = content[key]
        if sparse is None:
            sparse = range(step - 1, layers, step)
        if not all(type(layer) is int for layer in sparse):
            problems.append(f"{key} is a list of integers, got {sparse}")
        return {"moe_layer_freq": [int(layer in sparse) for layer in range(layers)]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        layers = model.layers
        sparse = [layer for layer, has in enumerate(_sparse(model)) if has]
        steps = [n for n in range(1, layers + 1) if sparse == list(range(n - 1, layers, n))]
        return {key: sparse, self.step: steps[0] if steps else 1}


@dataclass(frozen=True)
class SharedExperts(Meaning):
    """A config.json key with the number of shared experts; null and 0 are none.

    Each shared expert is as wide as one of the other experts.

    Attributes:
        default: the value that transformers assumes in this family for a missing key.
    """

    default: int | None

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        width = (content[key] or 0) * content["moe_intermediate_size"]
        return {"moe_shared_expert_intermediate_size": width or None}

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn}


@dataclass(frozen=True)
class Renormalised(Meaning):
    """A config.json key: whether the weights of a token's experts are divided by their sum.

    Only the value true can be converted, and only with several experts for a token.

    Attributes:
        default: the value that transformers assumes in this family for a missing key.
    """

    default: bool = True

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        problems += expected(content, {key: (True,)})
        if content["num_experts_per_tok"] == 1:
            problems.append(
                f"num_experts_per_tok is 1 and {key} true, so that every weight is "
                f"routed_scaling_factor; {_ALONE}"
            )
        return {}

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: True}


class Chosen(Same):
    """A config.json key with the number of experts of a token.

    The family always divides the weights of these experts by their sum. A single expert would
    always get the weight 1, so one expert is refused.
    """

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        if content[key] == 1:
            problems.append(f"{key} is 1, so that every weight is the same; {_ALONE}")
        return super().read(key, content, problems)


@dataclass(frozen=True)
class ExpertGroups(Meaning):
    """The config.json key n_group, the number of groups of experts, with two related keys.

    topk_group is the number of groups whose experts a token may use. topk_method may turn groups
    off.

    Attributes:
        counted: a group's score is the sum of the scores of this number of its best experts.
        groups: the value that transformers assumes in this family for a missing n_group.
        chosen: the value that transformers assumes in this family for a missing topk_group.
        method: the value of topk_method with which there are groups. None: the family has no such
            key and always has groups.
    """

    counted: int
    groups: int | None = 1
    chosen: int | None = 1
    method: str | None = None

    def keys(self, key: str) -> Fields:
        found: Fields = {key: self.groups, "topk_group": self.chosen}
        return found if self.method is None else found | {"topk_method": "greedy"}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        if self.method is not None:
            how = content["topk_method"]
            if how not in ("greedy", self.method):
                problems.append(
                    f"topk_method is {how}; only greedy and {self.method} can be converted"
                )
            if how != self.method:
                return {}
        # null is one group, and one group is none.
        groups = content[key] or 1
        chosen = content["topk_group"] or 1
        if chosen > groups:
            problems.append(f"topk_group {chosen} is more than {key} {groups}")
        if groups == 1:
            return {}
        found = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
        # Megatron-LM's rule counts the best k / chosen experts.
        if content["num_experts_per_tok"] // chosen == self.counted:
            return found
        return found | {"moe_router_group_score_topk": self.counted}

    def write(self, key: str, model: ModelConfig) -> Fields:
        groups = model.moe_router_num_groups
        found: Fields = {key: groups or 1, "topk_group": model.moe_router_group_topk or 1}
        if self.method is None:
            return found
        return found | {"topk_method": self.method if groups else "greedy"}
