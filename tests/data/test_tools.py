"""From text to a .bin/.idx pair through the tools, as a user calls them."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import programs
import pytest

from megapipe.config import DataConfig
from megapipe.data.indexed import IndexedDataset
from megapipe.data.preprocess import Encoding, preprocess
from megapipe.data.tokenizer import SentencePieceTokenizer
from megapipe.errors import DataError

TOOLS = programs.ROOT / "tools"
NUMBERS = Encoding(DataConfig(tokenizer_type="NullTokenizer", vocab_size=100), append_eod=True)


def run(tool: str, *args: object) -> subprocess.CompletedProcess[str]:
    return programs.run([TOOLS / tool, *args])


def json_lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def test_documents_keep_their_order_and_end_with_eod(model: str, tmp_path: Path) -> None:
    texts = [f"def f{i}():\n    return {i}\n" * (1 + i % 7) for i in range(3000)]  # several chunks, two processes
    corpus = json_lines(tmp_path / "c.jsonl", *({"text": t} for t in texts))
    flags = ["--input", corpus, "--output-prefix", tmp_path / "out", "--workers", 2, "--append-eod"]
    done = run("preprocess_data.py", *flags, "--tokenizer-model", model)
    assert done.returncode == 0, done.stderr
    prefix = f"{tmp_path}/out_text_document"
    assert done.stdout.splitlines()[-1].endswith(
        f"--data-path {prefix} --tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    )
    dataset, tokenizer = IndexedDataset(prefix), SentencePieceTokenizer(model)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[*tokenizer.encode(t), tokenizer.eod] for t in texts]
    assert "up to date" in run("preprocess_data.py", *flags, "--tokenizer-model", model, "--reuse").stdout


def test_empty_documents_get_no_eod_and_no_sequence(tmp_path: Path) -> None:
    corpus = json_lines(tmp_path / "c.jsonl", {"text": "1 2"}, {"text": ""}, {"text": "3"})
    (written,) = preprocess([corpus], str(tmp_path / "out"), NUMBERS, workers=1)
    dataset = IndexedDataset(written.prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2, 99], [3, 99]]
    assert dataset.documents.tolist() == [0, 1, 1, 2]
    assert (written.documents, written.tokens) == (3, 5)


def test_text_files_gz_crlf_blank_lines_and_several_keys(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2\n3\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "4"}\r\n\r\n{"text": "5"}'))
    (written,) = preprocess([f"{tmp_path}/a.txt", f"{tmp_path}/b.jsonl.gz"], f"{tmp_path}/out", NUMBERS, workers=1)
    assert IndexedDataset(written.prefix).tokens.tolist() == [1, 2, 3, 99, 4, 99, 5, 99]
    keys = Encoding(NUMBERS.tokenizer, ("x", "y"))
    both = preprocess([json_lines(tmp_path / "k.jsonl", {"x": "1", "y": "2 3"})], f"{tmp_path}/k", keys, workers=1)
    assert [w.prefix for w in both] == [f"{tmp_path}/k_x_document", f"{tmp_path}/k_y_document"]
    assert [IndexedDataset(w.prefix).tokens.tolist() for w in both] == [[1], [2, 3]]


BAD = {  # line of a file whose first line is good and whose second is blank
    b"{": "c.jsonl:3: not JSON",
    b"[1]": "c.jsonl:3: a JSON list; each line must be an object",
    b'{"txt": "1"}': "c.jsonl:3: key 'text' must be a text, but is missing; the line has txt",
    b'{"text": 1}': "c.jsonl:3: key 'text' must be a text, but is of type int",
    b'{"text": "\\ud800"}': "c.jsonl:3: key 'text' has a lone surrogate at character 0",
    b'{"text": "\xff"}': "c.jsonl:3: not UTF-8 at byte 10",
    b"[" * 100_000: "c.jsonl:3: JSON nested too deep to be read",
    b'{"text": "100"}': "c.jsonl:3: '100' is not an id from 0 to 99",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "1"}\n\n' + line + b"\n")
    with pytest.raises(DataError) as error:
        preprocess([str(tmp_path / "c.jsonl")], str(tmp_path / "out"), NUMBERS, workers=1)
    assert BAD[line] in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_long_line_with_a_nul_is_a_document_like_any_other(model: str, tmp_path: Path) -> None:
    text = "x = 1\0 " * 150_000
    corpus = json_lines(tmp_path / "c.jsonl", {"text": text})
    encoding = Encoding(DataConfig(tokenizer_model=model))
    (written,) = preprocess([corpus], str(tmp_path / "out"), encoding, workers=1)
    assert SentencePieceTokenizer(model).decode(IndexedDataset(written.prefix).tokens) == text


def test_wrong_flags_are_one_message_each_and_status_2(tmp_path: Path) -> None:
    done = run(
        "preprocess_data.py", "--input", tmp_path / "none.jsonl", "--output-prefix", tmp_path / "x", "--workers", 1
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("preprocess_data.py: error: --tokenizer-model is missing")
    megatrons = run("preprocess_data.py", "--split-sentences")
    assert megatrons.returncode == 2
    assert "--split-sentences is Megatron's; it is not implemented here" in megatrons.stderr
    small = run("train_tokenizer.py", "--input", json_lines(tmp_path / "s.jsonl", {"text": "a"}), "--output", "t")
    assert small.returncode == 2
    assert "SentencePiece cannot train on 1 lines: Vocabulary size too high" in small.stderr


def test_the_standard_library_becomes_a_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "stdlib.jsonl"
    done = run("make_stdlib_corpus.py", "--output", corpus)
    assert done.returncode == 0, done.stderr
    records = {r["path"]: r["text"] for r in map(json.loads, corpus.open(encoding="utf-8"))}
    assert records["json/__init__.py"] == Path(json.__file__).read_text("utf-8")
    assert corpus.stat().st_size > 10e6
    assert not any("site-packages" in path for path in records)
    assert "up to date" in run("make_stdlib_corpus.py", "--output", corpus, "--reuse").stdout


def test_entropy_of_equally_frequent_tokens_is_the_log_of_their_number(tmp_path: Path) -> None:
    corpus = json_lines(tmp_path / "c.jsonl", {"text": "9"}, {"text": "1 2 3 4 5 6 7 8"})
    preprocess([corpus], f"{tmp_path}/out", Encoding(NUMBERS.tokenizer), workers=1)
    done = run("unigram_entropy.py", "--data-path", f"{tmp_path}/out_text_document", "--split", "1,1,0")
    assert done.stdout == f"Unigram entropy of 8 validation tokens: {np.log(8):.4f} nats\n"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("text", "text"), "--json-keys text text names text 2 times. Give each key once"),
        (("../evil",), "--json-keys '../evil' cannot be a part of a file's name, PREFIX_KEY_document.bin"),
        (("",), "--json-keys '' cannot be a part of a file's name, PREFIX_KEY_document.bin"),
    ],
)
def test_a_key_that_cannot_name_its_files_is_refused_before_anything_is_made(tmp_path, keys, sentence) -> None:
    corpus = json_lines(tmp_path / "c.jsonl", {"text": "1", "../evil": "2", "": "3"})
    with pytest.raises(DataError) as error:
        preprocess([corpus], str(tmp_path / "out"), Encoding(NUMBERS.tokenizer, keys), workers=1)
    assert str(error.value) == sentence
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_pair_that_cannot_take_its_name_does_not_promise_the_former_one(tmp_path: Path) -> None:
    (tmp_path / "out_text_document.bin").mkdir()
    corpus = json_lines(tmp_path / "c.jsonl", {"text": "1"})
    with pytest.raises(DataError, match=r"cannot take its name: Is a directory. A former one may be gone; write it"):
        preprocess([corpus], str(tmp_path / "out"), NUMBERS, workers=1)
