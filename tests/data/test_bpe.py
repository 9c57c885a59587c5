"""Tokenizers of `tokenizers` and tiktoken give the ids of the libraries that Megatron-LM calls, and files are named."""

from __future__ import annotations

import base64
import inspect
import json
import re
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from programs import ROOT
from tokenizers import processors

from megapipe.config import DataConfig
from megapipe.data.fingerprint import fingerprint, foreign, write_fingerprint
from megapipe.data.tokenizers.tokenizer import NullTokenizer, build_tokenizer
from megapipe.errors import DataError

TEXTS = {
    "code": inspect.getsource(inspect)[:20000],
    "markup": json.dumps({"a": [1, 2.5e-3, None, {"b": "<p class='x'>\u00e9&amp;</p>"}]}, indent=2) * 20,
    "scripts": "".join(chr(c) for c in range(0x20, 0x3000) if unicodedata.category(chr(c))[0] in "LNPS")
    + "\u4f60\u597d \U0001f600\U0001f680 \ud55c\uad6d\uc5b4",
    "numbers": " ".join(f"{i} {i / 7:.5f} {i:,} 0x{i:x}" for i in range(0, 100000, 997)),
    "spaces": "a  b\t\tc\n\n\n d\r\n   e \u00a0f\u2028g" * 20,
    "special": "one<|endoftext|>two <|endoftext|> </s><s> three",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A small GPT-2 tokenizer trained here: its two files, and a folder as Hugging Face writes it."""
    folder = tmp_path_factory.mktemp("bpe")
    library = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    library.train_from_iterator(TEXTS.values(), vocab_size=900, special_tokens=["<|endoftext|>"], show_progress=False)
    library.save_model(str(folder))
    return SimpleNamespace(folder=folder, vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))


@pytest.fixture(scope="module")
def original(made: SimpleNamespace):
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2TokenizerFast(made.vocab, made.merges)


@pytest.fixture(scope="module")
def saved(made: SimpleNamespace, original) -> Path:
    """The Hugging Face folder, with an id that begins every text, as Llama 3's."""
    begin = original.convert_tokens_to_ids("<|endoftext|>")
    original.save_pretrained(made.folder / "plain")
    library = original.backend_tokenizer
    library.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    original.save_pretrained(made.folder / "begins")
    return made.folder


@pytest.mark.parametrize("kind", TEXTS)
def test_gpt2_files_give_the_ids_of_transformers(made, original, kind):
    ours = build_tokenizer(DataConfig(vocab_file=made.vocab, merge_file=made.merges))
    ids = ours.encode(TEXTS[kind])
    assert ids == original(TEXTS[kind], add_special_tokens=False).input_ids
    assert ours.decode(ids) == TEXTS[kind]
    assert (ours.vocab_size, ours.eod) == (len(original), original.eos_token_id)


@pytest.mark.parametrize("last", [2**31 - 1, 2**31])
def test_ids_need_not_follow_each_other_but_fit_a_token_file(made, tmp_path, last):
    vocab = json.loads(Path(made.vocab).read_text())
    token = max(vocab, key=vocab.__getitem__)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {token: last}))
    data = DataConfig(vocab_file=str(tmp_path / "vocab.json"), merge_file=made.merges)
    if last < 2**31:
        assert build_tokenizer(data).vocab_size == last + 1  # rows of the embedding, those of no token too
        return
    with pytest.raises(DataError, match=r"--vocab-file .* has the id 2147483648; ids are at most 2147483647"):
        build_tokenizer(data)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_hugging_face_folder_gives_the_ids_of_transformers(saved, kind):
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(saved / "begins", local_files_only=True)
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(saved / "begins"))
    ours = build_tokenizer(data)
    assert ours.encode(TEXTS[kind]) == auto(TEXTS[kind]).input_ids
    assert ours.encode(TEXTS[kind])[0] == ours.eod == auto.eos_token_id


def test_a_tokenizer_json_by_itself_and_without_what_it_puts_around_a_text(saved):
    file = str(saved / "begins" / "tokenizer.json")
    ours = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=file))
    bare = build_tokenizer(
        DataConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=file, tokenizer_hf_no_include_special_tokens=True
        )
    )
    assert ours.encode("x y") == [ours.eod, *bare.encode("x y")]


def test_tiktoken_gives_the_ids_of_its_ranks(tmp_path):
    """With either --tiktoken-pattern."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"in", b"ing"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)
    ]
    (tmp_path / "tik.json").write_text(json.dumps(entries))
    data = DataConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model=str(tmp_path / "tik.json"),
        tiktoken_num_special_tokens=10,
        vocab_size=271,
    )
    ours = build_tokenizer(data)
    # Special ids first, then each byte string at its rank; "the" in one token, the digits alone.
    assert ours.encode("the 12</s>") == [10 + 257, 10 + ord(" "), 10 + ord("1"), 10 + ord("2"), 2]
    assert ours.encode(" thing") == [10 + ord(" "), 10 + 256, 10 + 260]
    assert (ours.vocab_size, ours.eod) == (271, 2)
    for text in TEXTS.values():
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    "tokens, said",
    [
        ([bytes([i]) for i in range(255)], "256 tokens none is the byte 0xff, so no text with it has ids (1 lack)"),
        ([bytes([i]) for i in range(256)], "257 tokens ranks 7 and 256 are the same"),
        ([bytes([i]) for i in (7, *range(256))], "258 tokens ranks 0 and 8 are the same"),
    ],
)
def test_a_tiktoken_file_that_some_text_has_no_ids_in_is_named(tmp_path, tokens, said):
    """The library panics at the first byte that it does not know, which no handler sees."""
    pytest.importorskip("tiktoken")
    entries = [{"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate([*tokens, tokens[7]])]
    (tmp_path / "tik.json").write_text(json.dumps(entries))
    sizes = {"tiktoken_num_special_tokens": 10, "vocab_size": len(entries) + 10}
    with pytest.raises(DataError, match=re.escape(said)):
        build_tokenizer(DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "tik.json"), **sizes))


def test_aliases_and_defaults_name_one_kind():
    assert DataConfig().tokenizer == "SentencePieceTokenizer"
    assert DataConfig(vocab_file="v", merge_file="m").tokenizer == "GPT2BPETokenizer"
    for alias in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        assert DataConfig(tokenizer_type=alias).tokenizer == "SentencePieceTokenizer"


def test_a_null_tokenizers_eod_may_be_any_of_its_ids():
    data = DataConfig(tokenizer_type="NullTokenizer", vocab_size=100, null_tokenizer_eod_id=0)
    assert build_tokenizer(data).eod == 0
    with pytest.raises(DataError, match="--null-tokenizer-eod-id 100 is not one of the 100 ids"):
        build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=100, null_tokenizer_eod_id=100))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, "--vocab-file and --merge-file are missing"),
        ({"vocab_file": "no.json"}, "--merge-file is missing"),
        ({"vocab_file": "no.json", "merge_file": "no.txt"}, "--merge-file no.txt: No such file"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "meta/llama"}, "hf download meta/llama"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-model is missing"),
        ({"tokenizer_type": "TikTokenizer"}, "--tokenizer-model is missing"),
    ],
)
def test_what_cannot_be_read_is_named(data, message):
    with pytest.raises(DataError, match=message):
        build_tokenizer(DataConfig(**data))


def test_data_knows_its_tokenizer_whatever_files_it_came_from(made, saved, tmp_path):
    gpt2 = build_tokenizer(DataConfig(vocab_file=made.vocab, merge_file=made.merges))
    plain = build_tokenizer(
        DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(saved / "plain" / "tokenizer.json"))
    )
    begins = build_tokenizer(
        DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(saved / "begins" / "tokenizer.json"))
    )
    assert fingerprint(gpt2) == fingerprint(plain) != fingerprint(begins)
    prefix = str(tmp_path / "set")
    assert not list(foreign(prefix, gpt2))  # Megatron-LM's data has no such file
    write_fingerprint(prefix, gpt2, "GPT2BPETokenizer")
    assert not list(foreign(prefix, plain))
    assert not list(foreign(prefix, NullTokenizer(gpt2.vocab_size)))
    (line,) = foreign(prefix, begins)
    assert f"--data-path {prefix} was tokenised by another tokenizer, a GPT2BPETokenizer of" in line
    for damage in ("[]", '{"fingerprint": "0", "tokenizer_type": "x", "vocab_size": 3}', "[" * 100_000):
        Path(f"{prefix}.tokenizer.json").write_text(damage)
        assert "cannot be read. Delete it" in next(foreign(prefix, gpt2))


@pytest.mark.parametrize("token", [5, ["x"], {"content": 7}, {}, "no such token", "\ud83d"])
def test_an_end_of_text_that_is_no_token_is_named(saved, tmp_path, token):
    shutil.copy(saved / "plain" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    said = f"eos_token {json.dumps(token)} of {tmp_path}/tokenizer_config.json is none of its tokens"
    with pytest.raises(DataError, match=re.escape(said)):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


def test_code_of_a_tokenizers_folder_is_never_run_nor_asked_for(tmp_path, monkeypatch, capfd):
    """transformers asked whether to run it, and a y did."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    planted = tmp_path / "hub"
    planted.mkdir()
    (planted / "mine.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'marker')!r}).touch()\n")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (planted / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="holds no tokenizer that transformers can read"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(planted)))
    assert not (tmp_path / "marker").exists()


def test_no_call_of_transformers_leaves_open_whether_code_is_run():
    source = [path.read_text() for folder in ("megapipe", "tools") for path in (ROOT / folder).rglob("*.py")]
    calls = [call for text in source for call in re.findall(r"\.from_pretrained\([^)]*", text)]
    assert len(calls) == 4
    assert all("trust_remote_code=False" in call for call in calls)
