"""Checkpoints in Megatron-LM's layouts, laid out here by hand as its own code writes them, and ours in its layout."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import refused
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megapipe.checkpoint import commit
from megapipe.config import Config, ModelConfig
from megapipe.convert import SavedTensors, export_megatron, import_megatron
from megapipe.convert.checkpoints import write_checkpoint
from megapipe.convert.megatron.args import args_of
from megapipe.convert.megatron.export import open_export
from megapipe.convert.megatron.pickles import Named, read_pickle, read_torch
from megapipe.convert.tensors import whole_model
from megapipe.distributed.layout import layout_of

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=8,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    ffn_hidden_size=6,
    max_position_embeddings=8,
    padded_vocab_size=16,
    swiglu=True,
)
RUN = Config(model=MODEL).with_fields(micro_batch_size=1, global_batch_size=2, seq_length=8, train_iters=9, lr=0.1)
KINDS = ("", "exp_avg", "exp_avg_sq", "master")


def whole(bf16: bool) -> dict[str, Tensor]:
    """A run's tensors under our keys."""
    torch.manual_seed(1)
    params = dict(whole_model(MODEL).named_parameters())
    found = {}
    for name, param in params.items():
        if layout_of(param).tied_to is None:
            main = torch.randn(layout_of(param).full)
            found[name] = main.bfloat16() if bf16 else main
            found |= {f"optimizer.{kind}.{name}": torch.randn_like(main) for kind in ("exp_avg", "exp_avg_sq")}
            if bf16:
                found[f"optimizer.master.{name}"] = main
    return found


def run(bf16: bool) -> Config:
    return RUN.with_fields(bf16=bf16)


def ours(root: Path, bf16: bool) -> Path:
    state = {"iteration": 5, "consumed_train_samples": 10, "skipped_samples": 2}
    return write_checkpoint(root, run(bf16), whole(bf16).items(), state, 4)


def read_all(folder: Path) -> dict[str, Tensor]:
    saved = SavedTensors(folder)
    return {key: saved.read(key) for key in saved.shapes}


def rank_slice(name: str, x: Tensor, t: int, layer: int) -> Tensor:
    """Of tensor-parallel rank t of 2: [gate_r; up_r], rows of whole groups, columns."""
    if "linear_fc1" in name:
        return torch.cat([x[0].chunk(2)[t], x[1].chunk(2)[t]])
    if any(word in name for word in ("word_embeddings", "output_layer", "linear_qkv")):
        return x.chunk(2)[t].clone()
    rows = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    return x.chunk(2, dim=1)[t].clone() if rows else x


ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


def megatrons(
    root: Path, *, bf16: bool = False, te: bool = False, flat: bool = False, ends: bool = False, **other: object
) -> Path:
    """Format `torch`, tp 2 x pp 2 with 2 and 1 layers, after 4 steps of the optimizer.

    ends: embedding and head have a group of their own, as --decoupled-lr makes it.
    """
    tensors = whole(bf16)
    args = args_of(run(bf16)) | {"consumed_train_samples": 10, "consumed_valid_samples": 0} | other
    for t in range(2):
        for p, (first, last) in enumerate([(0, 2), (2, 3)]):
            kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
            for kind in KINDS:
                for name in [key for key in tensors if not key.startswith("optimizer.")]:
                    key = f"optimizer.{kind}.{name}" if kind else name
                    parts = name.split(".")
                    layer = int(parts[2]) if "layers" in parts else -1
                    here = first <= layer < last if layer >= 0 else (p == 0) == name.startswith("embedding")
                    if key not in tensors or not (here or (name.startswith("embedding.word") and p == 1)):
                        continue
                    local = f"decoder.layers.{layer - first}.{'.'.join(parts[3:])}" if layer >= 0 else name
                    if te:
                        local = local.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                        local = local.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
                    tied = p == 1 and name.startswith("embedding")
                    place = kinds[kind]
                    place["output_layer.weight" if tied else local] = rank_slice(name, tensors[key], t, layer)
            model = kinds[""]
            model = {name: model[name] for name in sorted(model, key=lambda name: name == "output_layer.weight")}
            apart = [n for n in model if ends and n in ENDS]
            rest = [n for n in model if n not in apart]
            ordered = [[n for n in rest if (model[n].ndim > 1) == wide] for wide in (True, False)]
            ordered += [apart] * ends
            numbers = iter(range(len(model)))
            groups = [
                {"wd_mult": wd, "step": 4, "params": [next(numbers) for _ in names], "is_decoupled_lr": names is apart}
                for wd, names in zip((1.0, 0.0, 1.0), ordered, strict=False)
            ]
            names = [name for group in ordered for name in group]
            state = {n: {kind: kinds[kind][name] for kind in KINDS[1:3]} for n, name in enumerate(names)}
            optimizer: dict[str, object] = {"state": state, "param_groups": groups}
            if bf16:
                mains = [[kinds["master"][name] for name in group] for group in ordered]
                optimizer = {"optimizer": optimizer, "fp32_from_fp16_params": mains}
            folder = root / "iter_0000005" / f"mp_rank_{t:02d}_{p:03d}"
            folder.mkdir(parents=True)
            if flat:
                optimizer = {"optimizer": {"param_groups": groups}}
                rows = {"param": kinds["master"] if bf16 else model, "exp_avg": kinds["exp_avg"]}
                rows["exp_avg_sq"] = kinds["exp_avg_sq"]
                flats = {kind: row([its[name] for name in reversed(model)]) for kind, its in rows.items()}
                torch.save({"buckets_coalesced": True, 0: {"float": flats}}, folder / "distrib_optim.pt")
            content = {
                "args": argparse.Namespace(**args),
                "iteration": 5,
                "model": model | {"decoder.layers.0.mlp.linear_fc1._extra_state": None},
                "optimizer": optimizer,
                "opt_param_scheduler": {"num_steps": 8},
            }
            torch.save(content, folder / "model_optim_rng.pt")
    (root / commit.POINTER).write_text("5")
    return root


def bucket(its: list[Tensor]) -> Tensor:
    """Each part begins at a multiple of 64 from the begin of its bucket."""
    at, pieces = 0, []
    for x in its:
        pieces += [torch.full((-at % 64,), 9.0), x.flatten().float()]
        at += -at % 64 + x.numel()
    return torch.cat(pieces)


def row(parts: list[Tensor]) -> Tensor:
    """A bucket of four and one of the others."""
    return torch.cat([bucket(parts[:4]), bucket(parts[4:])])


@pytest.mark.parametrize("bf16, te, flat", [(False, False, False), (True, True, False), (True, False, True)])
def test_ranks_files_become_one_checkpoint_with_the_optimizer_to_the_bit(tmp_path, bf16, te, flat):
    done = import_megatron(megatrons(tmp_path / "theirs", bf16=bf16, te=te, flat=flat), tmp_path / "ours")
    want = whole(bf16)
    got = read_all(done.folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    content = (done.folder / "state.json").read_text()
    assert done.folder.name == "iter_0000005"
    assert done.steps == 4
    assert '"consumed_train_samples": 10' in content
    assert '"skipped_samples": 2' in content
    assert done.config.model.query_groups == 2
    assert done.config.optimizer.lr == 0.1


@pytest.mark.parametrize("bf16", [False, True])
def test_state_of_embedding_and_head_with_a_rate_of_their_own_comes_in_to_the_bit(tmp_path, bf16):
    """--decoupled-lr gives them a group behind those of the other parameters, so the numbers follow another order."""
    done = import_megatron(megatrons(tmp_path / "theirs", bf16=bf16, ends=True, decoupled_lr=0.2), tmp_path / "ours")
    got, want = read_all(done.folder), whole(bf16)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert done.config.optimizer.decoupled_lr == 0.2


def test_rows_of_two_buckets_in_torch_dist_come_in_to_the_bit(tmp_path):
    """What --use-distributed-optimizer writes under --ckpt-format torch_dist: the rows of a bucket under its number."""
    plain = export_megatron(ours(tmp_path / "ours", True), tmp_path / "plain").folder
    rows, want = tmp_path / "rows" / plain.name, whole(True)
    held = {key: torch.empty(size, dtype=torch.bfloat16) for key, size in sizes_of(plain).items()}
    load(held, storage_reader=FileSystemReader(plain), no_dist=True)
    # Megatron's attention makes linear_proj before linear_qkv, and a row goes backwards.
    other = {"linear_qkv": "linear_proj", "linear_proj": "linear_qkv"}
    ours_in_order = [name for name in want if not name.startswith("optimizer.")]
    names = [re.sub("linear_(qkv|proj)", lambda of: other[of[0]], name) for name in ours_in_order][::-1]
    start = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_"
    for kind, of in {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items():
        for n, its in enumerate((names[:4], names[4:])):
            held[f"{start}{n}.{kind}"] = bucket([want[f"optimizer.{of}.{name}"] for name in its])
    save(held, storage_writer=FileSystemWriter(rows), no_dist=True)
    shutil.copy(plain / "common.pt", rows)
    (rows.parent / commit.POINTER).write_text("5")
    got = read_all(import_megatron(rows.parent, tmp_path / "again").folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def sizes_of(folder: Path) -> dict[str, torch.Size]:
    """Weights of a `torch_dist` checkpoint."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: entry for key, entry in entries.items() if hasattr(entry, "size")}
    return {key: entry.size for key, entry in tensors.items() if not key.startswith("optimizer.")}


@pytest.mark.parametrize("bf16", [False, True])
def test_what_goes_out_as_torch_dist_comes_in_again_to_the_bit(tmp_path, bf16):
    folder = ours(tmp_path / "ours", bf16)
    export_megatron(folder, tmp_path / "theirs")
    again = import_megatron(tmp_path / "theirs", tmp_path / "again").folder
    got, want = read_all(again), read_all(folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_torch_reads_what_goes_out_under_the_keys_that_megatron_asks_for(tmp_path):
    theirs = export_megatron(ours(tmp_path / "ours", False), tmp_path / "theirs").folder
    want = whole(False)
    fc1 = torch.stack([want[f"decoder.layers.{n}.mlp.linear_fc1.weight"].flatten(0, 1) for n in range(3)])
    norm = torch.stack([want[f"optimizer.exp_avg.decoder.layers.{n}.input_layernorm.bias"] for n in range(3)])
    asked = {
        "decoder.layers.mlp.linear_fc1.weight": torch.empty(3, 12, 8),
        "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight": torch.empty(3, 12, 8),
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.layer_norm_bias": torch.empty(3, 8),
    }
    load(asked, storage_reader=FileSystemReader(theirs), no_dist=True)
    for got, value in zip(asked.values(), (fc1, fc1, norm), strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("bf16, fused", [(False, None), (False, True), (True, None), (True, False)])
def test_steps_are_by_parameter_for_torchs_adam_and_in_the_groups_for_the_fused_ones(tmp_path, bf16, fused):
    theirs = export_megatron(ours(tmp_path / "ours", bf16), tmp_path / "theirs", fused=fused)
    held = torch.load(theirs.folder / "common.pt", weights_only=False)["optimizer"]
    assert (held["state"] == {}) == (bf16 if fused is None else fused)
    assert all(group["step"] == 4 for group in held["param_groups"])
    assert theirs.notes[0].startswith("the state of t" if held["state"] else "the state of T")


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


def test_a_choice_of_training_that_is_not_here_is_left_out_with_a_note(tmp_path):
    theirs = megatrons(
        tmp_path / "theirs", dataloader_type="external", tokenizer_type="MegaTokenizer", optimizer="lion"
    )
    done = import_megatron(theirs, tmp_path / "ours", optimizer=False)
    left = {"--dataloader-type external", "--tokenizer-type MegaTokenizer"}
    assert {f"{name} is not here; the flags leave it out" for name in left} <= {*done.notes}
    assert (done.config.data.dataloader_type, done.config.data.tokenizer_type) == ("single", None)


def test_samples_of_validation_come_in_with_those_of_training(tmp_path):
    done = import_megatron(megatrons(tmp_path / "theirs", consumed_valid_samples=6), tmp_path / "ours")
    where = json.loads((done.folder / "state.json").read_text())["state"]
    assert (where["consumed_train_samples"], where["consumed_valid_samples"]) == (10, 6)


def test_a_release_is_taken_for_the_start_of_a_run(tmp_path):
    theirs = megatrons(tmp_path / "theirs")
    (theirs / "iter_0000005").rename(theirs / "release")
    (theirs / commit.POINTER).write_text("release")
    done = import_megatron(theirs, tmp_path / "ours")
    content = json.loads((done.folder / "state.json").read_text())
    assert content["iteration"] == 0
    assert content["state"]["consumed_train_samples"] == 0
    assert done.steps is None


def test_what_megatron_asks_for_beside_weights_has_its_keys(tmp_path):
    """Each module of its layers has an extra state; the optimizer's state stands below its own name too."""
    theirs = export_megatron(ours(tmp_path / "ours", False), tmp_path / "theirs").folder
    keys = FileSystemReader(theirs).read_metadata().state_dict_metadata.keys()
    attention = ("core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")
    modules = [*(f"self_attention.{name}" for name in attention), "mlp.linear_fc1", "mlp.linear_fc2"]
    asked = {f"decoder.layers.{name}._extra_state/shard_{n}_3" for name in modules for n in range(3)}
    assert {key for key in keys if "decoder.layers" in key and "_extra_state" in key} == asked
    optimizer = torch.load(theirs / "common.pt", weights_only=False)["optimizer"]
    assert optimizer["optimizer"] == {name: optimizer[name] for name in ("state", "param_groups")}


@pytest.mark.parametrize("erf", [False, True])
def test_megatron_is_told_which_form_of_gelu_runs(erf):
    """Its fused bias and GELU compute the tanh form."""
    config = replace(run(False), model=replace(MODEL, swiglu=False, no_bias_gelu_fusion=erf))
    assert args_of(config)["bias_gelu_fusion"] == (not erf)


def test_groups_and_curve_of_the_optimizer_go_out_in_megatrons_words(tmp_path):
    """Weights of matrices decay, biases and norms do not; the decay goes from its start to its end."""
    decay = {"start_weight_decay": 0.02, "end_weight_decay": 0.06, "weight_decay_incr_style": "linear"}
    config = run(False).with_fields(**decay)
    state = {"iteration": 5, "consumed_train_samples": 10, "skipped_samples": 2}
    folder = write_checkpoint(tmp_path / "ours", config, whole(False).items(), state, 4)
    export = open_export(folder, tmp_path / "theirs", optimizer=True, fused=False)
    assert [(group["wd_mult"], group["weight_decay"]) for group in export.groups()] == [(1.0, 0.06), (0.0, 0.0)]
    curve = export.scheduler()
    assert (curve["start_wd"], curve["end_wd"], curve["num_steps"]) == (0.02, 0.06, 8)
