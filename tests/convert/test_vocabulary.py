"""A training's tokenizer goes along with an export: AutoTokenizer of the folder gives the ids of the training."""

from __future__ import annotations

import base64
import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
from random_models import FAMILIES, save, saved, transformers
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megapipe.config import Config, DataConfig, ModelConfig
from megapipe.convert import export_checkpoint, import_checkpoint
from megapipe.convert.huggingface.vocabulary import token_ids, write_tokenizer
from megapipe.data.tokenizers.tokenizer import build_tokenizer

MODEL = ModelConfig(max_position_embeddings=64)
CORPUS = (
    Path(__file__).read_text()
    + Path(find_spec("transformers").origin).read_text()[:30_000]
    + "\nif a < b > c: <x>" * 200
)
TEXTS = [
    *CORPUS.split("\n")[:300],
    CORPUS[:3000],
    "Gr\u00fc\u00dfe \u65e5\u672c \U0001f600",
    "  a  b ",
    "<s> <unk>",
    "\ta\r\n\n",
    "",
]


def train_sentencepiece(folder: Path, **kind: object) -> str:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split("\n")),
        model_prefix=str(folder / "t"),
        vocab_size=600,
        byte_fallback=True,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **kind,
    )
    return str(folder / "t.model")


OURS = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "user_defined_symbols": ["\n"],
}
LLAMA2 = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize("kind", [OURS, OURS | {"model_type": "bpe"}, LLAMA2, {}], ids=["ours", "bpe", "llama2", "nmt"])
def test_a_sentencepiece_model_becomes_a_tokenizer_json_of_the_same_ids(kind, tmp_path):
    data = DataConfig(tokenizer_model=train_sentencepiece(tmp_path, **kind))
    compare(data, tmp_path / "out", ties=kind.get("model_type") != "bpe")


def byte_level(folder: Path) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS.split("\n"), trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return library


@pytest.mark.parametrize("bare", [False, True])
def test_a_hugging_face_tokenizer_keeps_what_it_puts_around_a_text(bare, tmp_path):
    byte_level(tmp_path / "t")
    kind = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_hf_no_include_special_tokens": bare}
    compare(DataConfig(tokenizer_model=str(tmp_path / "t"), **kind), tmp_path / "out")
    begins = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["post_processor"]
    assert (begins is None) == bare


def test_gpt2s_pair_of_files_becomes_one(tmp_path):
    library = byte_level(tmp_path / "t")
    library.model.save(str(tmp_path))
    pair = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    compare(DataConfig(tokenizer_type="GPT2BPETokenizer", **pair), tmp_path / "out")


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktokens_ranks_become_merges(pattern, tmp_path):
    pytest.importorskip("tiktoken")
    library = byte_level(tmp_path / "t")
    tokens = sorted((i, library.decoder.decode([t]).encode()) for t, i in library.get_vocab().items() if i > 257)
    ranked = [bytes([i]) for i in range(256)] + [token for _, token in tokens if b"\xef\xbf\xbd" not in token]
    entries = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(ranked)]
    (tmp_path / "tik.json").write_text(json.dumps(entries))
    kind = {"tokenizer_type": "TikTokenizer", "tiktoken_pattern": pattern, "tiktoken_num_special_tokens": 10}
    data = DataConfig(tokenizer_model=str(tmp_path / "tik.json"), vocab_size=len(ranked) + 10, **kind)
    compare(data, tmp_path / "out")


def compare(data: DataConfig, out: Path, ties: bool = False) -> None:
    """ties: Unigram may find two orders of the same pieces equally probable; rounding decides, in 1 text of 100."""
    out.mkdir()
    config, ours = Config(model=MODEL, data=data), build_tokenizer(data)
    assert write_tokenizer(config, out) is None
    theirs = transformers.AutoTokenizer.from_pretrained(str(out))
    pairs = [(theirs(text)["input_ids"], ours.encode(text)) for text in TEXTS]
    assert all(sorted(a) == sorted(b) for a, b in pairs)
    assert sum(a != b for a, b in pairs) <= (len(pairs) // 100 if ties else 0)
    assert theirs.decode(ours.encode(CORPUS[:200])).removeprefix("<s>") == ours.decode(
        ours.encode(CORPUS[:200])
    ).removeprefix("<s>")
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eod == token_ids(config)["eos_token_id"]
    alone = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert alone.decode([ours.eod]) == "", "the end of a text is no text"


@pytest.mark.parametrize("asked, ids", [(None, 101), (100, 100)])
def test_an_export_says_its_type_and_as_many_ids_as_asked_for(tmp_path, asked, ids):
    """Without --vocab-size as many as the config.json that it stands next to."""
    saved("llama", 0, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    back = export_checkpoint(done.folder, tmp_path / "back", vocab_size=asked, companion=tmp_path / "hf")
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back.vocab_size, content["vocab_size"], content["torch_dtype"]) == (ids, ids, "float32")
    assert "dtype" not in content


def test_a_tokenizer_that_has_no_such_form_is_said_and_its_ids_are_written():
    data = DataConfig(tokenizer_type="NullTokenizer", vocab_size=101)
    assert write_tokenizer(Config(data=data), Path("none")) == "--tokenizer-type NullTokenizer has no tokenizer.json"
    assert token_ids(Config(data=data)) == {"bos_token_id": 100, "eos_token_id": 100, "pad_token_id": 100}


def test_an_export_has_the_ids_that_end_a_text_for_model_and_generation(tmp_path):
    saved("llama", 0, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    (tmp_path / "ours" / "huggingface").rename(tmp_path / "elsewhere")
    back = export_checkpoint(done.folder, tmp_path / "back", vocab_size=101)
    assert "no tokenizer is written: --tokenizer-type NullTokenizer has no tokenizer.json" in back.notes
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == 100
    assert transformers.GenerationConfig.from_pretrained(str(tmp_path / "back")).eos_token_id == 100


def test_the_end_of_a_text_keeps_its_gradient_in_an_export(tmp_path):
    """As the embedding's padding its row would have none in a training by transformers."""
    config = FAMILIES["llama"](random.Random("llama0"))
    config.tie_word_embeddings = False
    save(config, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    (tmp_path / "ours" / "huggingface").rename(tmp_path / "elsewhere")
    export_checkpoint(done.folder, tmp_path / "back", vocab_size=101)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.tensor([[7, 100, 8]])
    model(tokens, labels=tokens).loss.backward()
    assert model.get_input_embeddings().weight.grad[100].any()
    assert transformers.GenerationConfig.from_pretrained(str(tmp_path / "back")).pad_token_id == 100
