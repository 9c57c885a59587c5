"""From text to a .bin/.idx pair through the tools, as a user calls them."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import programs
import pytest

from megapipe.commands import preprocess as preprocess_command
from megapipe.commands import tokenizer
from megapipe.config import DataConfig
from megapipe.data.indexed import IndexedDataset
from megapipe.data.preprocess import Encoding, preprocess
from megapipe.data.tokenizers.tokenizer import SentencePieceTokenizer
from megapipe.errors import ConfigError, DataError, UserError

TOOLS = programs.ROOT / "tools"
NUMBERS = Encoding(DataConfig(tokenizer_type="NullTokenizer", vocab_size=100), append_eod=True)


def run(tool: str, *args: object) -> subprocess.CompletedProcess[str]:
    return programs.run([TOOLS / tool, *args])


def json_lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def test_documents_keep_their_order_and_end_with_eod(model: str, tmp_path: Path, capsys) -> None:
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
    again = [*map(str, flags[:4]), "--workers", "1", "--tokenizer-model", model, "--reuse"]
    preprocess_command.main([*again, "--append-eod"])
    assert "up to date" in capsys.readouterr().out
    preprocess_command.main(again)
    assert "3000 documents" in capsys.readouterr().out


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
    b'{"text": "1", "n": ' + b"1" * 5000 + b"}": "c.jsonl:3: Exceeds the limit (4300 digits) for integer string",
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


@pytest.mark.parametrize("workers", [0, 10**20])
def test_there_are_as_many_workers_as_a_host_can_have(tmp_path: Path, workers: int) -> None:
    corpus = json_lines(tmp_path / "c.jsonl", {"text": "1"})
    flags = ["--input", corpus, "--output-prefix", str(tmp_path / "out"), "--workers", str(workers)]
    with pytest.raises(ConfigError, match=f"--workers {workers} must be at least 1 and at most 4096"):
        preprocess_command.main(flags)


def test_the_standard_library_becomes_a_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "stdlib.jsonl"
    done = run("../megapipe/commands/start/corpus.py", "--output", corpus)
    assert done.returncode == 0, done.stderr
    records = {r["path"]: r["text"] for r in map(json.loads, corpus.open(encoding="utf-8"))}
    assert records["json/__init__.py"] == Path(json.__file__).read_text("utf-8")
    assert corpus.stat().st_size > 10e6
    assert not any("site-packages" in path for path in records)
    assert "up to date" in run("../megapipe/commands/start/corpus.py", "--output", corpus, "--reuse").stdout


def test_entropy_of_equally_frequent_tokens_is_the_log_of_their_number(tmp_path: Path) -> None:
    corpus = json_lines(tmp_path / "c.jsonl", {"text": "9"}, {"text": "1 2 3 4 5 6 7 8"})
    preprocess([corpus], f"{tmp_path}/out", Encoding(NUMBERS.tokenizer), workers=1)
    done = run(
        "../megapipe/commands/start/entropy.py", "--data-path", f"{tmp_path}/out_text_document", "--split", "1,1,0"
    )
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


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl", "many.jsonl", "many.jsonl.gz"])
@pytest.mark.parametrize("sample_kb", [4, 40, 1000])
def test_a_tokenizer_is_trained_on_as_much_as_was_asked_for_whatever_the_documents(tmp_path, name, sample_kb) -> None:
    """One large file was one document, drawn with a probability that its size made small: nothing, for ever."""
    lines = [f"line {i} of some text\n" for i in range(20_000)]
    documents = (
        ["".join(lines)] if name.startswith("one") else ["".join(lines[i : i + 20]) for i in range(0, 20_000, 20)]
    )
    content = "".join(documents) if name == "one.txt" else "".join(json.dumps({"text": d}) + "\n" for d in documents)
    packed = gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
    (tmp_path / name).write_bytes(packed)
    flags = tokenizer.Flags(input=(str(tmp_path / name),), sample_mb=sample_kb / 1000)
    size = sum(len(line) for line in tokenizer.lines(flags))
    expected = min(sample_kb * 1000, sum(map(len, lines)))
    assert 0.6 * expected < size < 1.4 * expected


def test_a_tokenizer_that_is_there_is_made_anew_for_other_flags(tmp_path, capsys) -> None:
    corpus = json_lines(tmp_path / "c.jsonl", {"text": Path(json.__file__).read_text()})
    flags = ["--input", corpus, "--output", str(tmp_path / "m.model"), "--reuse", "--vocab-size"]
    said = []
    for size in ("400", "400", "410"):
        tokenizer.main([*flags, size])
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert ["up to date" in line for line in said] == [False, True, False]
    assert SentencePieceTokenizer(str(tmp_path / "m.model")).vocab_size == 410


def test_what_a_tokenizer_cannot_be_is_told_before_the_text_is_read(tmp_path) -> None:
    def refused(*flags: object) -> str:
        with pytest.raises(UserError) as caught:  # and not that the input is missing
            tokenizer.main(["--input", "nowhere.txt", *map(str, flags)])
        return str(caught.value)

    assert refused("--output", tmp_path / "m", "--vocab-size", 0) == (
        "--vocab-size 0 must be at least 261: 256 bytes, 4 special ids and text"
    )


def test_a_damaged_gz_is_named(tmp_path) -> None:
    packed = bytearray(gzip.compress(b'{"text": "1"}\n' * 1000))
    packed[10:40] = b"\xff" * 30
    (tmp_path / "c.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"--input .*c\.jsonl\.gz: Error -3 while decompressing"):
        preprocess([str(tmp_path / "c.jsonl.gz")], str(tmp_path / "out"), NUMBERS, workers=1)


def test_a_reader_that_leaves_does_not_end_the_work_and_the_next_command_can_be_pasted(tmp_path) -> None:
    (tmp_path / "my data").mkdir()
    corpus = json_lines(tmp_path / "c.jsonl", *({"text": "1 2"} for _ in range(50)))
    flags = ["--input", corpus, "--output-prefix", tmp_path / "my data" / "x", "--tokenizer-type", "NullTokenizer"]
    flags += ["--vocab-size", 9, "--log-interval", 1]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, TOOLS / "preprocess_data.py", *map(str, flags)],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    said = run("preprocess_data.py", *flags, "--reuse").stdout.splitlines()[-1]
    assert shlex.split(said)[3:5] == ["--data-path", str(tmp_path / "my data" / "x_text_document")]


def test_on_a_terminal_documents_fill_a_bar_and_elsewhere_a_line_is_printed(tmp_path, monkeypatch, capsys):
    corpus = json_lines(tmp_path / "c.jsonl", *({"text": "1 2 3"} for _ in range(50)))
    flags = ["--input", corpus, "--output-prefix", f"{tmp_path}/out", "--tokenizer-type", "NullTokenizer"]
    flags += ["--vocab-size", "100", "--log-interval", "50"]
    preprocess_command.main(flags)
    assert "Processed 50 documents (" in capsys.readouterr().out
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    begun = iter(range(0, 1000, 5))
    monkeypatch.setattr("megapipe.commands.progress.time.monotonic", lambda: next(begun))
    preprocess_command.main(flags)
    said = capsys.readouterr()
    assert "Processed" not in said.out
    assert re.search(r"\r\[#+\.+\] +\d+% 50 documents, \d+ s left\r *\r$", said.err), said.err


def test_tokens_cut_off_before_their_notes_have_no_notes_of_former_ones(tmp_path, monkeypatch) -> None:
    """The old fingerprint vouched for the new tokens, and --reuse with the old flags said "up to date"."""
    corpus = json_lines(tmp_path / "c.jsonl", {"text": "1 2 3"})
    flags = ["--input", corpus, "--output-prefix", f"{tmp_path}/out", "--tokenizer-type", "NullTokenizer"]
    preprocess_command.main([*flags, "--vocab-size", "100"])
    assert len([*tmp_path.glob("out*.json")]) == 2

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megapipe.data.preprocess.write_fingerprint", cut_off)
    with pytest.raises(KeyboardInterrupt):
        preprocess_command.main([*flags, "--vocab-size", "200"])
    assert [*tmp_path.glob("out*.json")] == []
