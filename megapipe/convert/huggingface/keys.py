"""Meanings of the keys of a config.json, each written once and used in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.values import expected

Json = Mapping[str, Any]
Fields = dict[str, Any]

NEEDED: Any = object()
"""The default of a key that a config.json may not leave out, such as a size."""

LAYERS = "per_layer_overrides"
"""The field of `Meaning.read` for what differs between layers: a dictionary for each layer."""

# A field may be left to its default. Its resolved value is a property of another name.
_PROPERTIES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "query_groups",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "no_bias_gelu_fusion": "erf_gelu",
    "num_experts": "experts",
    "moe_ffn_hidden_size": "expert_ffn",
}


def value_of(model: ModelConfig, field: str) -> Any:
    """Return the value that a model uses for a field of ModelConfig.

    A field such as ffn_hidden_size may be None. The value then follows from other fields.
    """
    return getattr(model, _PROPERTIES.get(field, field))


class Meaning:
    """The meaning of a key of config.json, and of the keys that belong to it.

    `keys` returns the keys that `read` needs. `read` returns fields of ModelConfig for a
    config.json, `write` the keys for a model. `write_last` is for keys whose value follows from
    other keys. In each method, `key` is the name under which the family's table has this meaning.

    Attributes:
        default: the value that transformers assumes if the key is missing. Subclasses that read
            several keys override `keys` instead.
    """

    default: Any

    def keys(self, key: str) -> Fields:
        """Return {key that is read: value that transformers assumes if the key is missing}.

        The value is NEEDED for a key that must be given.
        """
        return {key: self.default}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        """Return {field of ModelConfig: value}, the fields that this meaning's keys set.

        Args:
            key: the name of this meaning's own key.
            content: the whole config.json, with defaults for the keys that it leaves out.
            problems: receives a text for each value that ModelConfig cannot express.
        """
        return {}

    def write(self, key: str, model: ModelConfig) -> Fields:
        """Return {key: value}, the entries that a model's config.json gets from this meaning.

        Args:
            key: the name of this meaning's own key.
        """
        return {}

    def write_last(self, key: str, content: Json) -> Fields:
        """Return {key: value}, this meaning's entries whose values follow from other keys.

        Args:
            key: the name of this meaning's own key.
            content: the config.json so far, with the keys that `write` of all meanings has
                returned.
        """
        return {}


@dataclass(frozen=True)
class Same(Meaning):
    """A config.json key with the value of one field of ModelConfig, or of several fields.

    Attributes:
        fields: names of fields, with spaces between. An import sets all of them to the key's value.
            An export writes the value of the first one.
        default: the value that transformers assumes for a missing key; NEEDED if it must be there.
        null: returns the value that null stands for, given the whole config.json. Default: null is
            None.
        unset: the value of the key if the field is None.
        only: the values that can be converted. Default: all.
    """

    fields: str
    default: Any = NEEDED
    null: Callable[[Json], Any] | None = None
    unset: Any = None
    only: tuple[Any, ...] = ()

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        value = content[key]
        # All problems of a file are reported at once, so reading goes on.
        if self.only:
            problems += expected(content, {key: self.only})
        if value is None and self.null is not None:
            value = self.null(content)
        if value == self.unset:
            value = None
        return dict.fromkeys(self.fields.split(), value)

    def write(self, key: str, model: ModelConfig) -> Fields:
        # The resolved value: a written file does not rest on defaults of the other side.
        value = value_of(model, self.fields.split()[0])
        return {key: self.unset if value is None else value}


@dataclass(frozen=True)
class Not(Meaning):
    """A config.json key that is true where a field of ModelConfig is false.

    Attributes:
        field: name of the field.
        default: the value that transformers assumes in this family for a missing key.
    """

    field: str
    default: bool

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        return {self.field: not content[key]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: not value_of(model, self.field)}


@dataclass(frozen=True)
class Choice(Meaning):
    """A config.json key whose values are other names for the values of a field.

    Attributes:
        field: name of the field of ModelConfig.
        values: {value of the key: value of the field}. If several keys have the field's value, the
            first is written.
        default: the value that transformers assumes in this family for a missing key.
    """

    field: str
    values: Mapping[Any, Any]
    default: Any

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        problems += expected(content, {key: tuple(self.values)})
        try:
            return {self.field: self.values.get(content[key])}
        except TypeError:  # a list or an object, which `expected` has named
            return {}

    def write(self, key: str, model: ModelConfig) -> Fields:
        value = value_of(model, self.field)
        return {key: next((its for its, ours in self.values.items() if ours == value), None)}


@dataclass(frozen=True)
class Reciprocal(Meaning):
    """A config.json key whose value is 1 divided by a field of ModelConfig.

    Attributes:
        field: name of the field.
        default: the value that transformers assumes in this family for a missing key.
    """

    field: str
    default: float

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        divisor = content[key]
        if divisor <= 0:
            problems.append(f"{key} is {divisor}, and divides; it must be above 0")
            return {}
        return {self.field: 1 / divisor}

    def write(self, key: str, model: ModelConfig) -> Fields:
        # The double rounding of 1 / (1 / x) is in the last digit. Nobody writes that many.
        return {key: float(f"{1 / value_of(model, self.field):.14g}")}


ATTENTION = ("qkv", "proj")
MLP = ("fc1", "fc2")
_ALL = {*ATTENTION, *MLP}


@dataclass(frozen=True)
class Biases(Meaning):
    """A config.json key that says whether some matrices have a bias.

    A family may have several such keys, each for other matrices.

    Attributes:
        default: the value that transformers assumes in this family for a missing key.
        matrices: names of these matrices, as in `ModelConfig.has_bias`.
        others: {another such key of the family: (default, matrices)}.
    """

    default: bool
    matrices: tuple[str, ...] = ATTENTION
    others: Mapping[str, tuple[bool, tuple[str, ...]]] = field(default_factory=dict)

    def _switches(self, key: str) -> dict[str, tuple[bool, tuple[str, ...]]]:
        return {key: (self.default, self.matrices), **self.others}

    def keys(self, key: str) -> Fields:
        return {name: default for name, (default, _) in self._switches(key).items()}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        found = {
            matrix
            for name, (_, matrices) in self._switches(key).items()
            if content[name]
            for matrix in matrices
        }
        # One flag is for biases of all matrices, and others for some of them.
        if found == _ALL:
            return {"disable_bias_linear": False}
        more = tuple(matrix for matrix in ("proj", "fc1", "fc2") if matrix in found)
        return {"disable_bias_linear": True, "add_qkv_bias": "qkv" in found, "add_bias_to": more}

    def write(self, key: str, model: ModelConfig) -> Fields:
        switches = self._switches(key).items()
        return {name: all(map(model.has_bias, matrices)) for name, (_, matrices) in switches}


class Only(Meaning):
    """A config.json key with one value that can be converted, or several equivalent ones.

    Args:
        values: the values that can be converted; the first one is written.
        default: the value that transformers assumes for a missing key; by default the first of
            `values`.
        silent: leave the key out of a config.json that is written.
    """

    def __init__(self, *values: Any, default: Any = NEEDED, silent: bool = False) -> None:
        self.values = values
        self.default = values[0] if default is NEEDED else default
        self.silent = silent

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        problems += expected(content, {key: self.values})
        return {}

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {} if self.silent else {key: self.values[0]}


@dataclass(frozen=True)
class Unread(Meaning):
    """A config.json key that changes nothing in the models that can be converted.

    Attributes:
        default: the value that transformers assumes in this family for a missing key.
    """

    default: Any = None


@dataclass(frozen=True)
class Twin(Meaning):
    """A config.json key that must have the value of another key, since one flag sets both.

    Attributes:
        other: the other key, whose own meaning sets the field.
        default: the value that transformers assumes in this family for a missing key.
        flag: the reason, for the error, such as "--hidden-dropout is both".
    """

    other: str
    default: Any
    flag: str

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        mine = content[key]
        its = content[self.other]
        if mine != its:
            problems.append(f"{key} {mine} with {self.other} {its}: {self.flag}")
        return {}

    def write_last(self, key: str, content: Json) -> Fields:
        return {key: content[self.other]}


@dataclass(frozen=True)
class Equals(Meaning):
    """A config.json key whose value follows from other keys. Null is accepted as well.

    Attributes:
        value: returns the key's value, given a whole config.json.
        default: the value that transformers assumes in this family for a missing key.
    """

    value: Callable[[Json], Any]
    default: Any = None

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        problems += expected(content, {key: (self.value(content), None)})
        return {}

    def write_last(self, key: str, content: Json) -> Fields:
        return {key: self.value(content)}


@dataclass(frozen=True)
class Groups(Meaning):
    """A config.json key with the number of key and value heads; null is one per query head.

    Attributes:
        default: the value that transformers assumes in this family for a missing key.
    """

    default: int | None = None

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        heads = content["num_attention_heads"]
        # One for each head is no grouping here: --num-query-groups has no effect then.
        groups = content[key] or heads
        grouped = groups != heads
        return {
            "group_query_attention": grouped,
            "num_query_groups": groups if grouped else 1,
        }

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: model.query_groups}
