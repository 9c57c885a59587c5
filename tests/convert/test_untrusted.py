"""A checkpoint may come from anyone: nothing in it runs, whichever program reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import LLAMA

import pretrain_gpt
from megapipe.checkpoint.save_load import save_checkpoint
from megapipe.checkpoint.saved_config import saved_config, saved_provider, with_checkpoint_args
from megapipe.commands import convert, generate
from megapipe.config import CheckpointConfig, Config, DataConfig, OptimizerConfig
from megapipe.convert import export_checkpoint
from megapipe.convert.huggingface.checks import notes
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import initialize

DATA = DataConfig(tokenizer_type="NullTokenizer", vocab_size=60)


class Planted:
    """A folder of checkpoints whose state.json names a program beside the shards, which leaves a mark where it runs."""

    def __init__(self, folder: Path) -> None:
        self.root, self.marker, self.program = folder / "hub", folder / "marker", folder / "hub" / "model.py"
        self.name = f"{self.program}:provider"
        model = replace(LLAMA, model_provider=self.name)
        module = gpt_provider(LLAMA, LayerSpan(0, LLAMA.layers, True, True), Axis())
        initialize(module, 1, Axis())
        counters = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
        config = Config(model=model, optimizer=OptimizerConfig(lr=0.1), data=DATA)
        self.folder = save_checkpoint(self.root, 1, [module], None, counters, config, ProcessMesh.single())
        self.program.write_text(
            f"from pathlib import Path\nPath({str(self.marker)!r}).touch()\n"
            "from megapipe.models.provider import gpt_provider as provider\n"
        )


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def says(planted: Planted) -> str:
    return (
        f"iter_0000001 was made with --model-provider {planted.name}. A checkpoint cannot choose which code runs: if "
        f"you trust that program, add --model-provider {planted.name}"
    )


RUN = "--micro-batch-size 2 --seq-length 12 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer"


def test_use_checkpoint_args_does_not_import_the_program_of_a_checkpoint(planted, capsys):
    with pytest.raises(SystemExit):
        pretrain_gpt.main(f"{RUN} --vocab-size 60 --load {planted.root} --finetune --use-checkpoint-args".split())
    assert says(planted) in capsys.readouterr().err
    assert not planted.marker.exists()


def test_the_program_of_the_command_line_is_used_instead(planted):
    flags = CheckpointConfig(load=str(planted.root), use_checkpoint_args=True)
    given = Config(model=replace(LLAMA, model_provider="mine:provider"), checkpoint=flags)
    assert with_checkpoint_args(given).model.model_provider == "mine:provider"


def test_a_text_is_generated_by_the_program_of_the_command_line_only(planted, capsys):
    flags = ["--load", str(planted.root), "--prompt", "1 2 3", "--num-tokens", "2"]
    with pytest.raises(CheckpointError) as caught:
        generate.main(flags)
    assert str(caught.value) == says(planted)
    assert not planted.marker.exists()
    generate.main([*flags, "--model-provider", planted.name])
    assert "1 2 3 " in capsys.readouterr().out
    assert planted.marker.exists()  # the program would have worked


def test_an_export_refuses_what_another_program_computes_and_does_not_ask_it(planted, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"was made with --model-provider .*only megapipe's own GPT can be exported"
    ):
        export_checkpoint(planted.folder, tmp_path / "out")
    assert not planted.marker.exists()


def test_what_is_shown_of_a_name_can_be_pasted_without_running_more(tmp_path):
    (tmp_path / "state.json").write_text('{"config": {"model": {"model_provider": "a:b; touch x"}}}')
    assert saved_provider(tmp_path) == "'a:b; touch x'"
    (tmp_path / "state.json").write_text('{"config": {"model": {"model_provider": "a:b\\u001b[2J"}}}')
    assert saved_provider(tmp_path) == r"'a:b\x1b[2J'"


def test_a_saved_configuration_names_no_program(planted):
    assert saved_config(planted.folder).model.model_provider is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--prompt one", "--prompt one: 'one' is not an id from 0 to 59"),
        ("--temperature nan", "--temperature nan must be a number of at least 0"),
        ("--temperature inf", "--temperature inf must be a number of at least 0"),
        ("--top-k -1", "--top-k -1 must be at least 0"),
    ],
)
def test_a_wrong_flag_of_the_generator_is_one_sentence(planted, flags, sentence):
    with pytest.raises(Exception, match=sentence):
        generate.main(["--load", str(planted.root), "--model-provider", planted.name, *flags.split()])


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", ".metadata", "mp_rank_00"])
def test_a_checkpoint_of_megatron_is_called_by_its_name(tmp_path, name, capsys):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / name).mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    for more in ("", " --use-checkpoint-args"):
        with pytest.raises(SystemExit):
            pretrain_gpt.main(f"{RUN} --vocab-size 60 {SIZES} --load {tmp_path}{more}".split())
        assert f"{tmp_path}/iter_0000005 is a checkpoint of Megatron-LM" in capsys.readouterr().err
    (tmp_path / "release").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    with pytest.raises(CheckpointError, match=r"/release is a checkpoint of Megatron-LM.*Convert it: megapipe convert"):
        generate.main(["--load", str(tmp_path)])


SIZES = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 12 --eval-iters 0"


def test_the_remedy_for_an_import_names_iteration_0(tmp_path):
    folder = tmp_path / "iter_0000000"
    folder.mkdir()
    (folder / "manifest.json").touch()
    with pytest.raises(CheckpointError, match=f"--load {tmp_path} --ckpt-step 0$"):
        generate.main(["--load", str(folder)])


def test_an_export_from_an_empty_folder_names_no_flag_that_was_not_given(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        convert.main(["--load", str(tmp_path), "--to-huggingface", str(tmp_path / "out")])
    assert str(caught.value) == f"--load {tmp_path} holds no checkpoint"


def test_a_conversion_notes_an_epsilon_that_is_not_our_default_and_no_other():
    """It said: norm epsilon is 1e-05; our default is 1e-05."""
    assert not [note for note in notes({}, LLAMA, 64) if "epsilon" in note]
    other = replace(LLAMA, norm_epsilon=1e-6)
    assert "norm epsilon is 1e-06; our default is 1e-05" in list(notes({}, other, 64))
