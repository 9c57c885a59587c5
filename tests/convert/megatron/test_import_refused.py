"""What of a Megatron-LM checkpoint cannot be taken over is named, and nothing in it is called."""

from __future__ import annotations

import os
import pickle
import shutil

import pytest
import torch
from random_models import refused

from megapipe.convert import import_megatron
from megapipe.convert.megatron.pickles import Named, read_pickle, read_torch
from tests.convert.megatron.by_hand import megatrons


class Trap:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_that_a_file_names_is_called(tmp_path):
    trap = Trap()
    trap.path = tmp_path / "made"
    with (tmp_path / "pickle").open("wb") as file:
        pickle.dump({"a": trap}, file)
    torch.save({"a": trap}, tmp_path / "torch")
    (value,) = read_pickle(tmp_path / "pickle").values()
    assert isinstance(value, Named)
    assert value.args == (str(trap.path),)
    # torch refuses some modules whatever stands for them.
    assert refused(lambda: read_torch(tmp_path / "torch"))[0].startswith(f"{tmp_path}/torch cannot be read: ")
    assert not trap.path.exists()


def test_a_damaged_pickle_gets_no_more_memory_than_its_bytes_can_need(tmp_path):
    (tmp_path / "pickle").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    said = refused(lambda: read_pickle(tmp_path / "pickle"))[0]
    assert said == f"{tmp_path}/pickle is damaged or no pickle: it asks for 2147483647 places at byte 3"


def test_a_pickle_that_refers_to_something_outside_itself_is_refused(tmp_path):
    (tmp_path / "pickle").write_bytes(pickle.PROTO + b"\x02" + pickle.NONE + pickle.BINPERSID + pickle.STOP)
    assert "persistent" in refused(lambda: read_pickle(tmp_path / "pickle"))[0]


@pytest.mark.parametrize(
    "other, text",
    [
        ({"mtp_use_repeated_layer": True}, "iter_0000005: --mtp-use-repeated-layer True is not supported"),
        ({"fp8": "hybrid"}, "iter_0000005: --fp8 hybrid is not supported"),
        ({"num_layers": 4}, "iter_0000005: lacks decoder.layers.3.input_layernorm.weight, "),
        ({"ffn_hidden_size": 8}, "mlp.linear_fc1.weight is [6, 8], but its arguments mean [2, 4, 8]"),
        ({"optimizer": "sgd"}, "--optimizer sgd is not supported; convert the weights alone with --no-load-optim"),
    ],
)
def test_what_cannot_be_taken_over_is_named_and_nothing_is_written(tmp_path, other, text):
    theirs = megatrons(tmp_path / "theirs", **other)
    assert any(text in line for line in refused(lambda: import_megatron(theirs, tmp_path / "ours")))
    assert not (tmp_path / "ours").exists()


def test_a_missing_rank_and_a_file_that_is_cut_off_are_named(tmp_path):
    theirs = megatrons(tmp_path / "theirs")
    path = theirs / "iter_0000005" / "mp_rank_01_000" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:500])
    assert str(path) in refused(lambda: import_megatron(theirs, tmp_path / "ours"))[0]
    path.unlink()
    path.parent.rmdir()
    text = f"{theirs}/iter_0000005 lacks mp_rank_01_000"
    assert refused(lambda: import_megatron(theirs, tmp_path / "ours")) == (text,)


@pytest.mark.parametrize("rank, rows", [(1, None), (1, 1), (0, None)])
def test_a_tensor_that_one_rank_lacks_or_has_in_another_shape_is_named(tmp_path, rank, rows):
    """It was a RuntimeError of torch, on the shape of a view, after the new folder had been made."""
    name = "embedding.word_embeddings.weight"
    folder = megatrons(tmp_path / "theirs") / "iter_0000005"
    for t, p in ((0, 0), (0, 1), (1, 0), (1, 1)):
        path = folder / f"mp_rank_{t:02d}_{p:03d}" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        model = content["model"]
        # The last stage has a copy under the same name, as before multi-token prediction.
        x = model.pop("output_layer.weight" if p else name)
        if t != rank:
            model[name] = x
        elif rows is not None:
            model[name] = x[:rows].clone()
        del content["optimizer"]
        torch.save(content, path)
    text = f"{folder}: {name} is missing on a rank, or has another shape there"
    assert refused(lambda: import_megatron(folder.parent, tmp_path / "ours", optimizer=False)) == (text,)


def test_state_of_a_tensor_that_one_rank_lacks_is_named_with_what_to_do(tmp_path):
    """The weight was named, which each rank has."""
    folder = megatrons(tmp_path / "theirs") / "iter_0000005"
    path = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    del content["optimizer"]["state"][0]
    torch.save(content, path)
    text = "exp_avg of embedding.word_embeddings.weight is missing on a rank, or has another shape there; "
    text += "convert the weights alone with --no-load-optim"
    assert refused(lambda: import_megatron(folder.parent, tmp_path / "ours")) == (f"{folder}: {text}",)


def test_a_missing_rank_of_no_pipeline_has_megatrons_short_name(tmp_path):
    folder = megatrons(tmp_path / "theirs", pipeline_model_parallel_size=1) / "iter_0000005"
    for t, name in enumerate(("mp_rank_00", "mp_rank_02")):
        shutil.rmtree(folder / f"mp_rank_{t:02d}_001")
        (folder / f"mp_rank_{t:02d}_000").rename(folder / name)
    assert refused(lambda: import_megatron(folder.parent, tmp_path / "ours")) == (f"{folder} lacks mp_rank_01",)


def test_a_pointer_that_is_no_text_is_shown_and_refused(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff5")
    text = f"{tmp_path}/latest_checkpointed_iteration.txt holds '\ufffd5', neither an iteration nor release"
    assert refused(lambda: import_megatron(tmp_path, tmp_path / "ours")) == (text,)
