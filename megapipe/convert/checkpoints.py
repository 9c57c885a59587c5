"""Import and export of whole checkpoints: everything is checked by name and shape before the first tensor is moved."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint import commit
from megapipe.checkpoint.resume import settings
from megapipe.checkpoint.save_load import STATE
from megapipe.checkpoint.saved_config import saved_config, saved_provider
from megapipe.config import Config, DataConfig, PrecisionConfig
from megapipe.convert.huggingface.checks import check_ours, check_theirs, notes, other_copies
from megapipe.convert.huggingface.deepseek import copies, depths_in
from megapipe.convert.huggingface.families import differing, from_huggingface, to_huggingface
from megapipe.convert.huggingface.mapping import Tensors, rules
from megapipe.convert.huggingface.vocabulary import token_ids, write_tokenizer
from megapipe.convert.sound import model_problems
from megapipe.convert.tensors import Progress, SavedTensors, ShardWriter, counted, is_trained
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.errors import CheckpointError, DataError
from megapipe.models.gpt import WORD_EMBEDDINGS

BESIDE = "huggingface"
"""Folder beside our checkpoints that keeps config.json and the tokenizer for the way back."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        folder: the checkpoint's own folder, or the Hugging Face model's.
        config: model, data and precision as flags of a run that takes it.
        notes: what means something else on the other side, a line each.
        vocab_size: rows of the embedding without padding; of Megatron-LM's, with it.
        steps: of the optimizer, if its state is there.
        dtype: of the weights written for or from Hugging Face, which may have rounded them.
    """

    folder: Path
    config: Config
    notes: tuple[str, ...]
    vocab_size: int
    steps: int | None = None
    dtype: torch.dtype | None = None


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    divisible_by: int = 128,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """A Hugging Face folder -> TARGET/iter_0000000, for --load TARGET --finetune at any tp, pp and schedule.

    Args:
        divisible_by: the vocabulary is padded to a multiple of this.
        dtype: of the weights; default bfloat16 if theirs is, else float32.
    Raises: CheckpointError with every tensor that is missing, left over or of another shape, or for a model that no run
        takes. Nothing is written then.
    """
    content = _read_json(source / "config.json")
    model = from_huggingface(content)
    vocab_size: int = content["vocab_size"]
    model = replace(model, padded_vocab_size=-(-vocab_size // divisible_by) * divisible_by)
    if commit.iterations_in(target):
        raise CheckpointError(f"{target} holds checkpoints already; give another folder")
    saved = SavedTensors(source)
    model = replace(model, mtp_num_layers=depths_in(saved.shapes, model.layers) or None)
    if model.layers > len(saved.shapes):
        raise CheckpointError(
            f"config.json means {model.layers} layers, but {source} holds {len(saved.shapes)} tensors"
        )
    if problems := model_problems(model):
        raise CheckpointError([f"config.json, as flags: {problem}" for problem in problems])
    prefix = "" if "wte.weight" in saved.shapes else "transformer."
    table = rules(model, content["model_type"], vocab_size, prefix=prefix)
    check_theirs(table, saved, model)
    if dtype is None:
        dtype = torch.bfloat16 if torch.bfloat16 in saved.dtypes.values() else torch.float32

    def tensor(rule: Tensors) -> tuple[str, Tensor]:
        joined = rule.join([saved.read(key) for key in rule.theirs])
        return rule.ours, joined.to(dtype if is_trained(rule.ours) else torch.float32)

    tensors = map(tensor, counted(table, progress))
    beside = target / BESIDE
    new = beside if target.exists() else target
    with nullcontext() if new.exists() else _scratch(new):
        _copy_others(source, beside)
        commit.write_durably(beside / "config.json", json.dumps(content, indent=2) + "\n")
        data, why = _data(beside, vocab_size, model.padded_vocab_size or vocab_size)
        config = Config(model=model, precision=PrecisionConfig(bf16=dtype == torch.bfloat16), data=data)
        final = write_checkpoint(target, config, tensors)
    said = *notes(content, model, vocab_size), *other_copies(saved, model), *why
    return Converted(final, config, said, vocab_size, dtype=dtype)


def write_checkpoint(
    target: Path,
    config: Config,
    tensors: Iterable[tuple[str, Tensor]],
    state: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> Path:
    """TARGET/iter_NNNNNNN, complete or not there.

    Args:
        tensors: by our names, each whole and in its saved shape, made when its turn comes.
        state: where the run is. Default: at its begin.
        steps: of the optimizer whose state is among the tensors.
    Returns: its folder.
    """
    start = {"iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    state = start | dict(state or {})
    iteration = state["iteration"]
    content = {
        "iteration": iteration,
        "state": state,
        "optimizer_steps": steps,
        "opt_param_scheduler": None if steps is None else settings(config),
        "config": dataclasses.asdict(config),
        "torch": torch.__version__,
    }
    with _scratch(commit.begin(target, iteration)) as folder:
        writer = ShardWriter(folder)
        for name, tensor in tensors:
            writer.add(name, tensor)
        names = writer.close()
        commit.write_durably(folder / STATE, json.dumps(content, indent=1) + "\n")
        return commit.commit(folder, iteration, commit.digest(folder, [*names, STATE]))


def export_checkpoint(
    folder: Path,
    target: Path,
    *,
    vocab_size: int | None = None,
    beside: Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """One of our checkpoints -> a folder that AutoModelForCausalLM.from_pretrained opens.

    Args:
        folder: iter_NNNNNNN.
        vocab_size: ids without padding. Default: that of config.json, or of the tokenizer of the training.
        beside: a Hugging Face folder whose config.json and tokenizer come along. Default: the one an import has left
            beside the checkpoints, if any; otherwise config.json is made from the checkpoint.
        dtype: of the weights; default as in the checkpoint.
    Raises: CheckpointError for damage, a model that no family can express, or a config.json of another model.
    """
    config = exportable(folder, target)
    model, saved = config.model, SavedTensors(folder)
    if beside is None and (folder.parent / BESIDE / "config.json").exists():
        beside = folder.parent / BESIDE
    if beside is not None:
        content = _read_json(beside / "config.json")
        if problems := differing(model, content, folder.name):
            raise CheckpointError([f"{beside}/config.json is of another model than {folder.name}:", *problems])
        vocab_size = vocab_size or content["vocab_size"]
    vocab_size = vocab_size or _vocab_size(config)
    check_ours(saved, model, folder.name)
    rows, *_ = saved.shapes[WORD_EMBEDDINGS]
    if vocab_size > rows:
        raise CheckpointError(
            f"{vocab_size} ids (--vocab-size, config.json or the tokenizer) are more than the {rows} rows of the "
            f"embedding of {folder.name}. Use --vocab-size {rows}, or fewer."
        )
    dtype = dtype or saved.dtypes[WORD_EMBEDDINGS]
    if beside is None:
        content = to_huggingface(model, vocab_size) | token_ids(config)
    content |= {"vocab_size": vocab_size, "torch_dtype": str(dtype).removeprefix("torch.")}
    content.pop("dtype", None)  # the newer name of torch_dtype; all versions of transformers read the older
    if model.depths and content["model_type"] == "gpt2":
        raise CheckpointError(f"{folder.name}: --mtp-num-layers {model.depths}: a gpt2 has no names for depths")
    table = rules(model, content["model_type"], vocab_size)
    further = copies(model)

    with fresh_folder(target) as out:
        writer = ShardWriter(out)
        for rule in counted(table, progress):
            kind = dtype if is_trained(rule.ours) else torch.float32
            for name, tensor in zip(rule.theirs, rule.split(saved.read(rule.ours)), strict=True):
                for its in (name, *(copy for copy, of in further.items() if of == name)):
                    writer.add(its, tensor.to(kind))
        writer.close()
        missing = None
        if beside is not None:
            _copy_others(beside, out)
        else:
            settings = {"do_sample": False, **token_ids(config)}
            commit.write_durably(out / "generation_config.json", json.dumps(settings, indent=2) + "\n")
            missing = write_tokenizer(config, out)
        commit.write_durably(out / "config.json", json.dumps(content, indent=2) + "\n")
    without = [f"no tokenizer is written: {missing}"] if missing else []
    return Converted(target, config, (*notes(content, model, vocab_size), *without), vocab_size, dtype=dtype)


def exportable(folder: Path, target: Path) -> Config:
    """The configuration of a checkpoint that is sound, of our own GPT, and has an empty place to go to."""
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; give another folder")
    files = commit.read_manifest(folder)
    commit.verify(folder, files, files)
    if (provider := saved_provider(folder)) is not None:
        raise CheckpointError(
            f"{folder.name} was made with --model-provider {provider}, and only megapipe's own GPT can be exported: "
            "a family of Hugging Face says nothing of what another program computes"
        )
    return saved_config(folder)


def _data(beside: Path, vocab_size: int, rows: int) -> tuple[DataConfig, list[str]]:
    """The folder's tokenizer, if it is one of ours, and why others of its files are not taken."""
    vocab, merges, notes = str(beside / "vocab.json"), str(beside / "merges.txt"), []
    kinds = {
        "tokenizer.model": DataConfig(tokenizer_type="SentencePieceTokenizer"),
        "tokenizer.json": DataConfig(tokenizer_type="HuggingFaceTokenizer"),
        "vocab.json": DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges),
    }
    for name, data in kinds.items():
        if not (beside / name).exists():
            continue
        if name != "vocab.json":
            data = replace(data, tokenizer_model=str(beside / name))
        try:
            ids = build_tokenizer(data).vocab_size
        except DataError as error:
            notes.append(f"no tokenizer is made of {name}: {error}")
            continue
        if ids <= rows:
            return data, notes
        notes.append(f"{name} is not taken: it has {ids} ids, and the embedding {rows} rows")
    return DataConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size), notes


def _vocab_size(config: Config) -> int:
    try:
        return build_tokenizer(config.data).vocab_size
    except DataError as error:
        raise CheckpointError(f"give the number of ids without padding with --vocab-size ({error})") from None


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, generation settings: small text files of the folder but config.json and the index of the weights."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        named = path.suffix in (".json", ".txt", ".model", ".jinja")
        if named and path.is_file() and not path.name.endswith(".index.json") and path.name != "config.json":
            shutil.copyfile(path, target / path.name)


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the target's place when all went well; an empty one gives way."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    fresh.mkdir()
    with _scratch(fresh):
        yield fresh
        fresh.replace(target)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder that is removed if it is not finished."""
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content
