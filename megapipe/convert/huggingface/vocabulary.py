"""A training's tokenizer as Hugging Face reads it: tokenizer.json, its settings, special ids.

The result is compared with ours on a few texts before it is kept. A text that spells the end of a
document, such as </s>, is that token in Hugging Face, and plain characters in megapipe. The same
holds for other special pieces of a model that has no piece for <.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megapipe.config import Config
from megapipe.data.tokenizers.bpe import BPETokenizer
from megapipe.data.tokenizers.tik import TikTokenizer
from megapipe.data.tokenizers.tokenizer import SentencePieceTokenizer, Tokenizer, build_tokenizer
from megapipe.errors import DataError

FILE = "tokenizer.json"
_OTHERS = ("special_tokens_map.json", "chat_template.jinja")
_SPACE = "\u2581"
# Types of pieces and models in SentencePiece's files.
_NORMAL = 1
_USER = 4
_BPE = 2
# What a tokenizer may do to a text: code, runs of spaces, other scripts, composed characters.
_SAMPLES = (
    "The quick brown fox, 1234.5 times;  twice.",
    "def f(x):\n\n    return {'a': [x**2, None]}\t# \\ \"quoted\"\n",
    " leading, trailing ",
    "",
    "Gr\u00fc\u00dfe, na\u00efve \u65e5\u672c\u8a9e \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\U0001f600 e\u0301 \ufb01",
    " a\r\nb\u00a0c",
)


def token_ids(config: Config) -> dict[str, int]:
    """Return the ids of bos, eos and pad under their keys of generation_config.json.

    Each id is the tokenizer's end-of-document id. Returns {} if the tokenizer's files are missing.
    """
    # Documents are separated by eod alone, so that it has all three parts.
    try:
        eod = build_tokenizer(config.data).eod
    except DataError:
        return {}
    return {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod}


def model_ids(config: Config) -> dict[str, int | None]:
    """Return {key of config.json: id} for bos and eos, and None for pad."""
    # transformers gives the embedding's row of pad no gradient, and Youtu's class makes it zero. A
    # key that is left out is not null: it means the default of the class.
    return {**token_ids(config), "pad_token_id": None}


def write_tokenizer(config: Config, target: Path) -> str | None:
    """Write tokenizer.json and tokenizer_config.json into `target`.

    Args:
        config: configuration of the training, with the flags of its tokenizer.
    Returns: the reason why the files are not written; None if they are written.
    """
    data = config.data
    try:
        ours = build_tokenizer(data)
    except DataError as error:
        return str(error)
    try:
        library = _library(ours)
    except ValueError as error:
        return f"--tokenizer-type {data.tokenizer} {error}"
    for text in _SAMPLES:
        # Pieces in another order are as probable under Unigram: the library sums in float64,
        # SentencePiece in float32.
        if sorted(library.encode(text).ids) != sorted(ours.encode(text)):
            return f"the tokenizer made of {data.tokenizer_model} has other ids for {text!r}"
    eod = library.id_to_token(ours.eod)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eod,
        "eos_token": eod,
        "pad_token": eod,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.model.max_position_embeddings,
    }
    library.save(str(target / FILE))
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if data.tokenizer == "HuggingFaceTokenizer":
        folder = Path(data.tokenizer_model or "")
        if not folder.is_dir():
            folder = folder.parent
        for name in _OTHERS:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
    return None


def _library(ours: Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer of the library `tokenizers` that should give the same ids as `ours`.

    Raises: ValueError with the reason why there is none.
    """
    if isinstance(ours, BPETokenizer):
        return ours.library()
    if isinstance(ours, SentencePieceTokenizer):
        return _of_sentencepiece(ours.proto(), ours.eod)
    if isinstance(ours, TikTokenizer):
        return _of_tiktoken(ours)
    raise ValueError("has no tokenizer.json")


def _of_tiktoken(ours: TikTokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer of the library `tokenizers` that cuts texts as tiktoken does.

    Of all neighbouring tokens, BPE first merges the two that give the token with the lowest id.

    Args:
        ours: the tokenizer to replace.
    """
    # GPT-2's characters for bytes: printable bytes stand for themselves.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    spelled = {byte: chr(byte) for byte in printed}
    spelled |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocab = {"".join(spelled[byte] for byte in token): i for token, i in ours.ids.items()}
    merges = list(_merges(vocab, [_NORMAL] * ours.vocab_size))
    library = tokenizers.Tokenizer(models.BPE(ours.specials | vocab, merges, ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(ours.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, normalized=False) for name in ours.specials])
    return library


def _of_sentencepiece(proto: bytes, eod: int) -> tokenizers.Tokenizer:
    """Return a tokenizer of the library `tokenizers` that cuts texts as SentencePiece does.

    The result uses the library's own Unigram or BPE.

    Args:
        proto: the bytes of SentencePiece's model.
        eod: the end-of-document id.
    Raises: ValueError for a model of another kind.
    """
    from sentencepiece import sentencepiece_model_pb2 as pb2

    model: Any = pb2.ModelProto.FromString(proto)  # type: ignore[attr-defined,unused-ignore]
    spec = model.trainer_spec
    if spec.treat_whitespace_as_suffix or spec.model_type not in (1, _BPE):
        raise ValueError("is no Unigram or BPE with spaces before words")
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    kinds = [piece.type for piece in model.pieces]
    if spec.model_type == _BPE:
        vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
        library = tokenizers.Tokenizer(
            models.BPE(
                vocab,
                list(_merges(vocab, kinds)),
                unk_token=pieces[spec.unk_id][0],
                fuse_unk=True,
                byte_fallback=spec.byte_fallback,
            )
        )
    else:
        # A piece that only the library itself may choose must lose against any way to spell it:
        # <0x41> is six characters.
        known = [score for (_, score), kind in zip(pieces, kinds, strict=True) if kind == _NORMAL]
        least = 7 * min(known) - 10
        scored = [
            (piece, score if kind == _NORMAL else least)
            for (piece, score), kind in zip(pieces, kinds, strict=True)
        ]
        library = tokenizers.Tokenizer(models.Unigram(scored, spec.unk_id, spec.byte_fallback))
    dummy = model.normalizer_spec.add_dummy_prefix
    library.normalizer = normalizers.Sequence(list(_normalizers(model.normalizer_spec)))
    strip = [decoders.Strip(" ", 1, 0)] if dummy else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    names = [piece for piece, _ in pieces]
    # Pieces that a user defined are never cut, nor normalised.
    own = [name for name, kind in zip(names, kinds, strict=True) if kind == _USER]
    library.add_tokens([AddedToken(name, normalized=False) for name in own])
    library.add_special_tokens([AddedToken(names[eod], normalized=False)])
    return library


def _normalizers(spec: Any) -> Iterator[Any]:
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Strip()
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(_SPACE)
    yield normalizers.Replace(" ", _SPACE)


def _merges(vocab: dict[str, int], kinds: list[int]) -> Iterator[tuple[str, str]]:
    """Yield (left, right) for every two pieces that together are a third, by the third one's id.

    Args:
        vocab: piece -> id.
        kinds: the kind of each id, in SentencePiece's numbering; only normal pieces are yielded.
    """
    # Earlier pieces have the higher scores.
    for piece, i in vocab.items():
        if kinds[i] == _NORMAL:
            cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
            ways = [(left, right) for left, right in cuts if left in vocab and right in vocab]
            yield from sorted(ways, key=lambda way: (vocab[way[0]], vocab[way[1]]))
