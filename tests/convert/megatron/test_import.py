"""Checkpoints in Megatron-LM's layouts, laid out by hand as its own code writes them, come in to the bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megapipe.checkpoint import commit
from megapipe.convert import export_megatron, import_megatron
from tests.convert.megatron.by_hand import bucket, megatrons, ours, read_all, whole


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
