"""A small model's checkpoint in Megatron-LM's layout, laid out by hand as its own code writes it, and in ours."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint import commit
from megapipe.config import Config, ModelConfig
from megapipe.convert import SavedTensors
from megapipe.convert.checkpoints import write_checkpoint
from megapipe.convert.megatron.args import args_of
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
