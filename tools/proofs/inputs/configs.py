"""Draw a config.json with something changed, and compare what comes in with transformers.

    python -m tools.proofs.inputs.configs --cases 200 --seed 0

A case takes a small model of a drawn family and changes one key of its config.json: to another
value, to a value of another type, to no value; or it adds a key, of a newer version or of another
family. The file then comes in as transformers computes it, with logits within 2e-6 of the largest,
or is refused in one line. It must not become another model without a word.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support" / "models")]
# Before transformers is imported: nothing is asked of the network, and nothing is drawn on stderr.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

import torch  # noqa: E402

from megapipe.convert import import_checkpoint  # noqa: E402
from megapipe.convert.huggingface.family import IGNORED  # noqa: E402
from megapipe.errors import CheckpointError  # noqa: E402
from megapipe.flags.parse import parse, run  # noqa: E402
from tools.proofs.shrink import Draws, Fuzzer  # noqa: E402

CLOSE = 2e-6
LONGEST = 400
"""Characters of a refusal's line: some list the families that there are."""
_OTHERS: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "silu", "relu2", "gelu_pytorch_tanh", "relu"],
    "activation_function": ["gelu", "gelu_new", "relu"],
    "layer_types": [["full_attention"] * 8, ["sliding_attention"] * 8, ["full_attention"]],
    "topk_method": ["greedy", "noaux_tc"],
}
# Keys of other families, of newer models, and of older programs.
_MORE: dict[str, list[Any]] = {
    "attention_multiplier": [0.3],
    "final_logit_softcapping": [30.0],
    "query_pre_attn_scalar": [16],
    "sliding_window": [3],
    "use_qk_norm": [True],
    "partial_rotary_factor": [0.5],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}],
    "rope_parameters": [{"full_attention": {"rope_type": "default", "rope_theta": 1e4}}],
    "residual_multiplier": [0.5],
    "use_parallel_residual": [True],
    "mlp_bias": [True],
    "attention_gate": ["per_head"],
    "hyper_connections": [4],
    "num_hash_layers": [2],
    "quantization_config": [{"quant_method": "mxfp4"}],
    "transformers_version": ["9.9.9"],
}


class Case(NamedTuple):
    """A config.json and what was done to it."""

    family: str
    what: str
    content: Mapping[str, Any]


def drawn(draw: random.Random, families: Mapping[str, Callable[[random.Random], Any]]) -> Case:
    """Draw a case. families: model_type -> a small configuration of transformers."""
    family = draw.choice(sorted(families))
    content = json.loads(json.dumps(families[family](draw).to_dict()))
    content["model_type"] = family
    kind = draw.choice(["changed", "missing", "type", "newer"])
    if kind == "newer":
        key = draw.choice(sorted(_MORE))
        value = draw.choice(_MORE[key])
        return Case(family, f"{key} is {value}", content | {key: value})
    own = sorted(key for key in content if key not in IGNORED)
    # Without its large epsilon, rounding alone moves the logits of a gated delta net by more.
    if "linear_num_key_heads" in own:
        own.remove("rms_norm_eps")
    key = draw.choice(own)
    where, name = content, key
    # Half of the time a key within rope_parameters.
    if isinstance(content[key], dict) and draw.random() < 0.5:
        where = content[key] = dict(content[key])
        name = draw.choice(sorted(where))
    if kind == "missing":
        del where[name]
        return Case(family, f"{key}: no {name}", content)
    old = where[name]
    where[name] = _other_type(draw, old) if kind == "type" else _changed(draw, name, old)
    return Case(family, f"{key}: {name} is {where[name]!r}, was {old!r}", content)


def _changed(draw: random.Random, name: str, old: Any) -> Any:
    if name in _OTHERS:
        return draw.choice(_OTHERS[name])
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draw.choice([old * 2, old + 1, 1, 2, 0, -1])
    if isinstance(old, float):
        return draw.choice([old * 2, old / 2, 1.0, 0.0, -0.5])
    if isinstance(old, list) and old:
        return draw.choice([[*old[1:], old[0]], old[:-1], []])
    if isinstance(old, str):
        return draw.choice(["default", "yarn", "llama3", "linear", "silu"])
    return draw.choice([1, 2, 4, True, 0.5])


def _other_type(draw: random.Random, old: Any) -> Any:
    values = [None, str(old), [old], {"a": old}, True, 1.5, float("inf"), 3]
    return draw.choice([value for value in values if type(value) is not type(old)])


def outcome(case: Case, folder: Path) -> str:
    """Return what became of a case: "exact", "refused", "alone", or a text of what is wrong.

    "alone" is a file that transformers does not take, and that came in.
    """
    random_models = importlib.import_module("random_models")
    want: torch.Tensor | None = None
    try:
        config = random_models.transformers.AutoConfig.for_model(**case.content)
        random_models.save(config, folder / "hf")
        written = json.loads((folder / "hf" / "config.json").read_text())
        said = dict(case.content) | {"architectures": written["architectures"]}
        (folder / "hf" / "config.json").write_text(json.dumps(said))
        want = random_models.theirs(folder / "hf")
    except Exception:  # transformers has no common class of errors
        if not (folder / "hf" / "model.safetensors").exists():
            return _refused_alone(case)
    try:
        done = import_checkpoint(folder / "hf", folder / "ours", divisible_by=8)
    except CheckpointError as error:
        return _line(error)
    if want is None:
        return "alone"
    got = random_models.ours(done.folder, done.config.model, want.shape[-1])
    difference = (got - want).abs().max() / want.abs().max()
    return "exact" if difference <= CLOSE else f"logits differ by {difference:.2g} of the largest"


def _refused_alone(case: Case) -> str:
    """Return the outcome of a file for which transformers makes no model."""
    families = importlib.import_module("megapipe.convert.huggingface.families")
    try:
        families.from_huggingface(case.content)
    except CheckpointError as error:
        return _line(error)
    return "alone"


def _line(error: CheckpointError) -> str:
    """Return "refused" for an error whose problems are a line each, else what is wrong with it."""
    for problem in error.problems:
        if "\n" in problem or len(problem) > LONGEST:
            return f"no line: {problem}"
    return "refused"


def compare(case: Case, counts: Counter[str]) -> list[str]:
    """Return what is wrong with the outcome of a case. counts: receives outcomes that are right."""
    with tempfile.TemporaryDirectory() as folder:
        found = outcome(case, Path(folder))
    if found in ("exact", "refused", "alone"):
        counts[found] += 1
        return []
    return [f"{case.family}, {case.what}: {found[:300]}"]


def fuzzer(counts: Counter[str]) -> Fuzzer[Case]:
    """Return what draws and compares cases."""
    warnings.simplefilter("ignore")
    families = importlib.import_module("drawn_families").DRAWN
    return Fuzzer("configs", partial(drawn, families=families), partial(compare, counts=counts))


@dataclass(frozen=True)
class Flags(Draws):
    """Draw config.json with something changed, and compare what comes in with transformers."""

    cases: float = 200
    """How many."""


def main(argv: Sequence[str]) -> None:
    counts = Counter[str]()
    fuzzer(counts).prove(parse(Flags, argv))
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    run(main)
