"""Import and export whole checkpoints of Hugging Face models.

Names and shapes of all tensors are checked before the first one is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint import commit
from megapipe.checkpoint.resume import settings
from megapipe.checkpoint.save_load import STATE
from megapipe.checkpoint.saved_config import saved_config, saved_provider
from megapipe.config import Config, DataConfig, PrecisionConfig
from megapipe.convert.folders import copy_others, fresh_folder, read_json, scratch, write_json
from megapipe.convert.huggingface.checks import check_ours, check_theirs, notes, other_copies
from megapipe.convert.huggingface.depths import copies, depths_in
from megapipe.convert.huggingface.families import differing, from_huggingface, to_huggingface
from megapipe.convert.huggingface.mapping import Tensors, rules
from megapipe.convert.huggingface.tables import FAMILIES
from megapipe.convert.huggingface.towers import left_out, name_in, text_of
from megapipe.convert.huggingface.vocabulary import model_ids, token_ids, write_tokenizer
from megapipe.convert.mxfp4 import Mxfp4Tensors, is_mxfp4
from megapipe.convert.sound import model_problems
from megapipe.convert.tensors import Progress, SavedTensors, ShardWriter, counted, saved_dtype
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.errors import CheckpointError, DataError
from megapipe.models.gpt import WORD_EMBEDDINGS

COMPANION = "huggingface"
"""Folder next to the checkpoints that keeps config.json and the tokenizer for a later export."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        folder: the folder of the new checkpoint, or of the new Hugging Face model.
        config: flags of model, data and precision, for a run that loads the result. After an
            export, the configuration of the checkpoint.
        notes: a line for the user about each setting that means something else in the other
            program.
        vocab_size: ids without padding if the other program is Hugging Face's; rows of the
            embedding with padding if it is Megatron-LM.
        steps: updates of the optimizer, if an import took its state; else None.
        dtype: type to which the written weights are rounded; None for Megatron-LM.
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
    """Convert a Hugging Face folder to TARGET/iter_0000000, for --load TARGET --finetune.

    The checkpoint suits any tensor- and pipeline-parallel size and any schedule.

    Args:
        source: the Hugging Face folder.
        target: a folder without checkpoints.
        divisible_by: the vocabulary is padded to a multiple of this.
        dtype: type of the weights. Default: bfloat16 if the source has any such tensor, else
            float32.
        progress: is called with (done, total) before every tensor and at the end.

    Raises: CheckpointError with every tensor that is missing, left over or of another shape, or for
        a model that no run accepts. Nothing is written then.
    """
    # The model that config.json describes, and whether a run accepts it.
    content = text_of(read_json(source / "config.json"))
    quantised = is_mxfp4(content)
    if quantised:
        # The imported weights are bfloat16.
        content = {key: x for key, x in content.items() if key != "quantization_config"}
    model = from_huggingface(content)
    family = content["model_type"]
    vocab_size: int = content["vocab_size"]
    # Rows of padding, so that tensor parallelism divides the vocabulary.
    model = replace(model, padded_vocab_size=-(-vocab_size // divisible_by) * divisible_by)
    if commit.iterations_in(target):
        raise CheckpointError(f"{target} holds checkpoints already; give another folder")
    files = Mxfp4Tensors if quantised else SavedTensors
    saved = files(source, partial(name_in, family))
    # The tensors say how many depths of multi-token prediction there are: files may lack them.
    model = replace(model, mtp_num_layers=depths_in(saved.shapes, model.layers) or None)
    # Before the table of all tensors is made: a wrong number could fill the memory with names.
    if model.layers > len(saved.shapes):
        raise CheckpointError(
            f"config.json means {model.layers} layers, "
            f"but {source} holds {len(saved.shapes)} tensors"
        )
    if problems := model_problems(model):
        raise CheckpointError([f"config.json, as flags: {problem}" for problem in problems])

    # The place of every tensor, and whether names and shapes fit.
    prefix = "" if "wte.weight" in saved.shapes else "transformer."
    table = rules(model, family, vocab_size, prefix=prefix, stored=saved.shapes)
    check_theirs(table, saved, model)
    if dtype is None:
        has_bfloat16 = torch.bfloat16 in saved.dtypes.values()
        dtype = torch.bfloat16 if has_bfloat16 else torch.float32

    def tensor(rule: Tensors) -> tuple[str, Tensor]:
        joined = rule.join([saved.read(key) for key in rule.theirs])
        return rule.ours, joined.to(saved_dtype(rule.ours, dtype))

    # The companion comes first, because the configuration names its tokenizer.
    tensors = map(tensor, counted(table, progress))
    companion = target / COMPANION
    new = companion if target.exists() else target
    # After an error, folders that were not there before are removed.
    with nullcontext() if new.exists() else scratch(new):
        copy_others(source, companion)
        write_json(companion / "config.json", content)
        data, why = _data(companion, vocab_size, model.padded_vocab_size or vocab_size)
        precision = PrecisionConfig(bf16=dtype == torch.bfloat16)
        config = Config(model=model, precision=precision, data=data)
        final = write_checkpoint(target, config, tensors)
    others = (*other_copies(saved, model), *left_out(family, saved.stored))
    lines = (*notes(content, model, vocab_size), *others, *why)
    return Converted(final, config, lines, vocab_size, dtype=dtype)


def write_checkpoint(
    target: Path,
    config: Config,
    tensors: Iterable[tuple[str, Tensor]],
    state: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> Path:
    """Write the folder TARGET/iter_NNNNNNN and return it. After a crash it is complete or missing.

    Args:
        target: TARGET, the folder that holds the checkpoints' folders.
        config: the configuration that the checkpoint records.
        tensors: (megapipe's name, whole tensor in its saved shape). The tensors are made one at a
            time.
        state: the progress of the run, as JSON. Default: the beginning of a run.
        steps: steps of the optimizer if its state is among the tensors; None without its state.
    """
    start = {"iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    state = start | dict(state or {})
    iteration = state["iteration"]
    content = {
        "iteration": iteration,
        "state": state,
        "optimizer_steps": steps,
        "opt_param_scheduler": None,
        "config": dataclasses.asdict(config),
        "torch": torch.__version__,
    }
    if steps is not None:
        content["opt_param_scheduler"] = settings(config)
    with scratch(commit.begin(target, iteration)) as folder:
        writer = ShardWriter(folder)
        for name, tensor in tensors:
            writer.add(name, tensor)
        names = writer.close()
        # In this order: a checkpoint counts once its manifest is there, with a digest of each file.
        commit.write_durably(folder / STATE, json.dumps(content, indent=1) + "\n")
        return commit.commit(folder, iteration, commit.digest(folder, [*names, STATE]))


def export_checkpoint(
    folder: Path,
    target: Path,
    *,
    vocab_size: int | None = None,
    companion: Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert a checkpoint to a folder that AutoModelForCausalLM.from_pretrained opens.

    Args:
        folder: iter_NNNNNNN.
        target: a new or empty folder.
        vocab_size: ids without padding. Default: from config.json, or the training's tokenizer.
        companion: a Hugging Face folder whose config.json and tokenizer are used. Default: the copy
            that an import left next to `folder`, or else a config.json made from the checkpoint.
        dtype: type of the weights. Default: as in the checkpoint.
        progress: is called with (done, total) before every tensor and at the end.

    Raises: CheckpointError for damage, a model that no model_type can express, or a config.json of
        another model.
    """
    config = exportable(folder, target)
    model = config.model
    saved = SavedTensors(folder)
    # The config.json that an import left gives back what megapipe's configuration does not hold.
    left = folder.parent / COMPANION
    if companion is None and (left / "config.json").exists():
        companion = left
    if companion is not None:
        content = read_json(companion / "config.json")
        if problems := differing(model, content, folder.name):
            head = f"{companion}/config.json is of another model than {folder.name}:"
            raise CheckpointError([head, *problems])
        vocab_size = vocab_size or content["vocab_size"]
    vocab_size = vocab_size or _vocab_size(config)
    check_ours(saved, model, folder.name)
    # Rows after the last id are padding, which is left out.
    rows, *_ = saved.shapes[WORD_EMBEDDINGS]
    if vocab_size > rows:
        raise CheckpointError(
            f"{vocab_size} ids (--vocab-size, config.json or the tokenizer) are more than the "
            f"{rows} rows of the embedding of {folder.name}. Use --vocab-size {rows}, or fewer."
        )

    # The new config.json, and a rule for each tensor.
    dtype = dtype or saved.dtypes[WORD_EMBEDDINGS]
    if companion is None:
        content = to_huggingface(model, vocab_size) | model_ids(config)
    content["vocab_size"] = vocab_size
    content["torch_dtype"] = str(dtype).removeprefix("torch.")
    # The newer name of torch_dtype; all versions of transformers read the older one.
    content.pop("dtype", None)
    family = content["model_type"]
    if model.depths and not FAMILIES[family].has_depths:
        raise CheckpointError(
            f"{folder.name}: --mtp-num-layers {model.depths}: a {family} has no names for depths"
        )
    table = rules(model, family, vocab_size)
    further = copies(model)

    with fresh_folder(target) as out:
        writer = ShardWriter(out)
        for rule in counted(table, progress):
            kind = saved_dtype(rule.ours, dtype)
            tensors = rule.split(saved.read(rule.ours))
            for name, tensor in zip(rule.theirs, tensors, strict=True):
                writer.add(name, tensor.to(kind))
                # Depths of multi-token prediction repeat the model's embedding and head.
                for copy, original in further.items():
                    if original == name:
                        writer.add(copy, tensor.to(kind))
        writer.close()
        missing = _write_others(config, companion, out)
        write_json(out / "config.json", content)
    lines = [*notes(content, model, vocab_size)]
    if missing:
        lines.append(f"no tokenizer is written: {missing}")
    return Converted(target, config, tuple(lines), vocab_size, dtype=dtype)


def _write_others(config: Config, companion: Path | None, target: Path) -> str | None:
    """Write the tokenizer and the generation settings of an export.

    Args:
        config: configuration of the training, whose tokenizer is written without a companion.
        companion: the Hugging Face folder whose files are copied; None without one.
        target: the folder of the export.

    Returns: the reason why no tokenizer is written; None if one is.
    """
    if companion is not None:
        copy_others(companion, target)
        return None
    generation = {"do_sample": False, **token_ids(config)}
    write_json(target / "generation_config.json", generation)
    return write_tokenizer(config, target)


def exportable(folder: Path, target: Path) -> Config:
    """Return the configuration of a checkpoint that can be exported.

    Raises: CheckpointError if it is damaged or not of megapipe's own GPT, or if the target is not
        empty.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; give another folder")
    # Damage is found before the first tensor is written.
    files = commit.read_manifest(folder)
    commit.verify(folder, files, files)
    if (provider := saved_provider(folder)) is not None:
        raise CheckpointError(
            f"{folder.name} was made with --model-provider {provider}, and only megapipe's own GPT "
            "can be exported: a family of Hugging Face says nothing of what another program "
            "computes"
        )
    return saved_config(folder)


def _data(folder: Path, vocab_size: int, rows: int) -> tuple[DataConfig, list[str]]:
    """Return (flags of a folder's tokenizer, reasons why tokenizer files are not used).

    Without a tokenizer that megapipe can read, the flags choose the NullTokenizer.

    Args:
        folder: a Hugging Face folder.
        vocab_size: number of ids of the NullTokenizer.
        rows: rows of the embedding; a tokenizer with more ids is not used.
    """
    notes = []
    gpt2 = DataConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )
    kinds = {
        "tokenizer.model": DataConfig(tokenizer_type="SentencePieceTokenizer"),
        "tokenizer.json": DataConfig(tokenizer_type="HuggingFaceTokenizer"),
        "vocab.json": gpt2,
    }
    # In order of preference, the first one that fits the embedding.
    for name, data in kinds.items():
        if not (folder / name).exists():
            continue
        if name != "vocab.json":
            data = replace(data, tokenizer_model=str(folder / name))
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
    """Return the number of ids of the training's tokenizer.

    Raises: CheckpointError if the tokenizer's files are missing.
    """
    try:
        return build_tokenizer(config.data).vocab_size
    except DataError as error:
        raise CheckpointError(
            f"give the number of ids without padding with --vocab-size ({error})"
        ) from None
