"""Text from models that are not ours, and from tokenizers that have moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint.save_load import save_checkpoint
from megapipe.commands import generate
from megapipe.config import Config, DataConfig, OptimizerConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError, ConfigError, DataError
from megapipe.models.build import build_stage
from megapipe.partition.spans import LayerSpan

from ..training.plain import LAYERS, MODEL, VOCAB, Plain


class NextPosition(Plain):
    """Without labels its likeliest next token is the number of the position, which it asks for."""

    def forward(self, tokens: Tensor, position_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert self.input is None
        assert labels is None
        return torch.nn.functional.one_hot(position_ids, VOCAB).float()


class Losses(Plain):
    def forward(self, tokens: Tensor, position_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return tokens.float()


class Broken(Plain):
    def forward(self, tokens: Tensor, position_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return torch.full((*tokens.shape, VOCAB), float("nan"))


def next_position(config, span, tp):
    return NextPosition(span)


def broken(config, span, tp):
    return Broken(span)


def losses(config, span, tp):
    return Losses(span)


@pytest.fixture
def load(tmp_path: Path) -> list[str]:
    module = build_stage(next_position, MODEL, LayerSpan(0, LAYERS, True, True), Axis(), 1)
    data = DataConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB)
    counters = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
    model = replace(MODEL, max_position_embeddings=8)  # a flag that every run has
    config = Config(model=model, optimizer=OptimizerConfig(lr=0.1), data=data)
    save_checkpoint(tmp_path, 1, [module], None, counters, config, ProcessMesh.single())
    return ["--load", str(tmp_path), "--prompt", "7 7", "--num-tokens", "3", "--temperature", "0"]


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "find_provider", {"next": next_position, "losses": losses, "broken": broken}.get)


def test_a_plain_module_is_given_positions_and_asked_for_logits(load, capsys):
    generate.main([*load, "--model-provider", "next"])
    assert capsys.readouterr().out.endswith("7 7 1 2 3\n")


def test_flags_of_a_draw_are_named_where_nothing_is_drawn(load, capsys):
    generate.main([*load, "--model-provider", "next", "--top-k", "3", "--seed", "5"])
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "--top-k 3 is without effect: --temperature 0 takes the likeliest token each time"
    assert second.startswith("--seed 5 is without effect")


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        (["--top-k", "1", "--seed", "5", "--temperature", "2"], ["--temperature 2.0", "--seed 5"]),
        (["--top-k", "1000", "--temperature", "2"], ["--top-k 1000"]),
        (["--top-k", "2", "--seed", "5", "--temperature", "2"], []),
    ],
)
def test_a_flag_that_no_draw_depends_on_is_named(load, capsys, given, idle):
    generate.main([*load[:-2], "--model-provider", "next", *given])
    notes = [line for line in capsys.readouterr().out.splitlines() if "without effect" in line]
    assert [note.partition(" is without effect: ")[0] for note in notes] == idle


@pytest.mark.parametrize("temperature", ["0", "1e-300", "5e-324"])
def test_a_temperature_may_be_as_small_as_a_number_is(load, capsys, temperature):
    generate.main([*load[:-1], temperature, "--model-provider", "next"])
    assert capsys.readouterr().out.endswith("7 7 1 2 3\n")


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_logits_that_are_no_numbers_are_the_checkpoints_fault(load, temperature):
    with pytest.raises(CheckpointError, match="after 2 tokens the model's logits are not finite, as its weights are"):
        generate.main([*load[:-1], temperature, "--model-provider", "broken"])


@pytest.mark.parametrize("tokens", [0, 10**20])
def test_a_text_has_an_end(load, tokens):
    with pytest.raises(ConfigError, match=f"--num-tokens {tokens} must be at least 1 and at most 100000"):
        generate.main([*load, "--num-tokens", str(tokens)])


def test_a_model_that_gives_no_logits_is_named(load):
    with pytest.raises(ConfigError) as caught:
        generate.main([*load, "--model-provider", "losses"])
    assert str(caught.value) == (
        f"--model-provider losses: without labels the whole model returns logits [b, s, v], here [1, 2, {VOCAB}]; "
        "it returned [1, 2]"
    )


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--tokenizer-model m", "a NullTokenizer does not read --tokenizer-model m. Add --tokenizer-type Hugging"),
        ("--vocab-file v --merge-file m", "a NullTokenizer does not read --vocab-file v and --merge-file m. Add"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model m --merge-file n",
            "a HuggingFaceTokenizer does not read --merge-file n",
        ),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model nowhere", "nowhere: No such file or directory"),
    ],
)
def test_a_tokenizers_file_that_is_not_read_is_named(load, flags, said):
    with pytest.raises((ConfigError, DataError), match=said):
        generate.main([*load, "--model-provider", "next", *flags.split()])
