"""Small files of every kind that a user hands to a command; fuzz.py damages them."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import os
import runpy
import shutil
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SIZES = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 2 --lr 1e-3 --distributed-backend "
    "gloo "
    "--eval-iters 0 --num-workers 0"
)
NULL = "--tokenizer-type NullTokenizer --vocab-size 127"
WORDS = {
    "SIZES": SIZES,
    "NULL": NULL,
    "MOCK": f"{SIZES} --mock-data {NULL} --split 1,0,99",
    "QUICK": f"{SIZES} --split 1,0,0 --train-iters 1",
    "SP": "--tokenizer-model t.model",
}
"""What stands for $NAME in the commands of tools/proofs/inputs/scenes.toml."""
TEXT = [
    f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs, \u00e9 \U0001f600."
    for i in range(60)
]


def nothing(folder: Path) -> None:
    """A command that reads no file."""


def _call(folder: Path, program: str, words: str) -> None:
    """A command of ours in a folder, in a process of its own, that works."""
    importlib.import_module(program.removesuffix(".py").replace("/", "."))
    if not (pid := os.fork()):
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        os.chdir(folder)
        sys.argv = [str(ROOT / program), *words.split()]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert not os.waitpid(pid, 0)[1], f"{program} {words}"


def costs(folder: Path) -> None:
    """Write files of costs of stages, of messages, and of a device."""
    from megapipe.schedule import Costs
    from megapipe.schedule.costs_file import dump_costs

    of_stages = Costs(
        f=(1.0, 1.5, 1.0, 2.0),
        b=(1.0, 1.0, 1.0, 2.5),
        w=(1.0, 0.5, 1.0, 1.0),
        comm=(0.1, 0.1, 0.2),
        g=1.0,
        u=0.5,
    )
    (folder / "costs.json").write_text(dump_costs(of_stages))
    message = '{"latency": 0.1, "bytes": [1, 2, 3], "bandwidth": 10}'
    more = f'"w": 8, "comm": {message}, "overhead": 0.5'
    (folder / "costs2.json").write_text(f'{{"f": 10, "b": [11, 12, 13, 14], {more}}}')
    device = {"flops": 1e14, "node": 2, "inside": 1e11, "outside": 1e10}
    device |= {"latency": 1e-5, "overhead": 1e-4}
    (folder / "device.json").write_text(json.dumps(device))


def schedules(folder: Path) -> None:
    """Write schedules as files of each kind."""
    from megapipe.schedule import build
    from megapipe.schedule.text import to_csv, to_json

    (folder / "one.json").write_text(to_json(build("zb-h1", 4, 8)))
    (folder / "two.csv").write_text(to_csv(build("1f1b", 4, 8)))
    (folder / "three.json").write_text(to_json(build("zb-v", 4, 8)))
    (folder / "four.csv").write_text(to_csv(build("dualpipe", 4, 8)))
    (folder / "five.csv").write_text(to_csv(build("1f1b", 4, 8), torch=True))


_HEAD = """
from megapipe.schedule import Kind, Pass, Placement, Schedule, build, loop
def make(ranks, microbatches):
    good = build('1f1b', ranks, microbatches).ranks
    {}
make_deep = make
number = 5
"""
_BODIES = """
good       return build('zb-h1', ranks, microbatches)
none       return None
text       return 'x'
raises     raise KeyError('x')
ends       raise SystemExit
divides    return 1 / 0
deep       return make_deep(ranks, microbatches)
table      return [[(Kind.F, 0, 0)]]
empty      return Schedule('x', loop(ranks, 1), microbatches, ())
rows       return Schedule('x', loop(ranks, 1), microbatches, ((),) * ranks)
nones      return Schedule('x', loop(ranks, 1), microbatches, (None,) * ranks)
words      return Schedule('x', loop(ranks, 1), microbatches, (('F', 'B'),) * ranks)
placement  return Schedule('x', None, microbatches, good)
places     return Schedule('x', Placement((0, 'a', None, 1.5)), microbatches, good)
name       return Schedule(None, loop(ranks, 1), microbatches, good)
huge       return Schedule('x', loop(ranks, 1), 4, (((Pass(Kind.F, 9**9, 9**9),),),) * ranks)
negative   return Schedule('x', loop(ranks, 1), microbatches, (((Pass(Kind.F, -1, -1),),),) * ranks)
shares     return Schedule('x', loop(ranks, 2), microbatches, good)
"""
_BROKEN = {
    "broken": "def make(ranks, microbatches:",
    "import": "import nothing_that_exists",
    "class": "class make:\n    def __init__(self, ranks, microbatches):\n        pass",
}


def programs(folder: Path) -> None:
    """Write schedules as functions of a user, good and bad."""
    bodies = dict(line.split(maxsplit=1) for line in _BODIES.strip().splitlines())
    sources = _BROKEN | {name: _HEAD.format(body) for name, body in bodies.items()}
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source + "\n")


def text(folder: Path) -> None:
    """Lines of JSON and plain text, packed and not."""
    rows = ({"text": line, "n": i, "more": {"x": [1, line]}} for i, line in enumerate(TEXT))
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "c.jsonl").write_text(lines)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1, mtime=0))
    ids = (json.dumps({"text": f"{i} 5 7 9"}) for i in range(60))
    (folder / "ids.jsonl").write_text("\n".join(ids))
    plain = "\n".join(TEXT)
    (folder / "p.txt").write_text(plain)
    (folder / "p.txt.gz").write_bytes(gzip.compress(plain.encode(), 1, mtime=0))


def tokenizers(folder: Path) -> None:
    """Write tokenizers of each kind, and text for them."""
    import tokenizers

    text(folder)
    _call(folder, "tools/train_tokenizer.py", "--input c.jsonl --output t.model --vocab-size 304")
    library = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    library.train_from_iterator(
        TEXT, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    library.save_model(str(folder))
    (folder / "hf").mkdir()
    library.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|endoftext|>"}, "bos_token": null}'
    )
    (folder / "hf" / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "slow").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / name, folder / "slow")
    slow = {"eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"}
    (folder / "slow" / "tokenizer_config.json").write_text(json.dumps(slow))
    (folder / "slow" / "config.json").write_text('{"model_type": "gpt2"}')
    words = [*(bytes([i]) for i in range(256)), b"th"]
    ranks = [
        {"rank": i, "token_bytes": base64.b64encode(word).decode(), "token_str": "x"}
        for i, word in enumerate(words)
    ]
    (folder / "tik.json").write_text(json.dumps(ranks))


def tokens(folder: Path) -> None:
    """Pairs, lists of them, an index cache."""
    text(folder)
    prepared = f"--input ids.jsonl --output-prefix d {NULL} --append-eod"
    _call(folder, "tools/preprocess_data.py", prepared)
    for end in ("bin", "idx"):
        shutil.copy(folder / f"d_text_document.{end}", folder / f"e.{end}")
    (folder / "parts.json").write_text(
        '{"train": ["0.3", "d_text_document", "0.7", "e"], "valid": ["e"], "test": null}'
    )
    (folder / "list.txt").write_text("0.3 d_text_document 0.7 e")
    (folder / "layers.json").write_text(
        '{"0-1,3": {"ffn_hidden_size": 24}, "2": {"num_attention_heads": 1}}'
    )
    _call(
        folder,
        "pretrain_gpt.py",
        f"{WORDS['QUICK']} {NULL} --data-path d_text_document --data-cache-path cache",
    )


def started(folder: Path) -> None:
    """A quickstart on a corpus of some lines that has come to its training."""
    (folder / "x").mkdir()
    lines = (json.dumps({"text": f"{line} {n}"}) for n, line in enumerate(TEXT * 20))
    (folder / "x" / "stdlib.jsonl").write_text("\n".join(lines))


def checkpoint(folder: Path) -> None:
    """Write a checkpoint of megapipe."""
    _call(
        folder,
        "pretrain_gpt.py",
        f"{WORDS['MOCK']} --num-layers 2 --save ck --save-interval 1",
    )


def hugging_face(folder: Path) -> None:
    """Write a GPT-2 in one file and a Llama in two, as we export them."""
    checkpoint(folder)
    _call(folder, "tools/convert_checkpoint.py", "--load ck --to-huggingface two --no-check")
    _call(folder, "pretrain_gpt.py", f"{WORDS['MOCK']} {_LLAMA} --num-layers 2 --save llama")
    _call(folder, "tools/convert_checkpoint.py", "--load llama --to-huggingface hf --no-check")
    for made in ("ck", "llama"):
        shutil.rmtree(folder / made)
    _in_two_files(folder / "hf")


_LLAMA = (
    "--normalization RMSNorm --swiglu --ffn-hidden-size 24 --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --save-interval 2"
)


def _in_two_files(folder: Path) -> None:
    """Deal the tensors of a folder to two files, with an index of them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where: dict[str, str] = {}
    for i in range(2):
        part = dict(list(tensors.items())[i::2])
        name = f"model-{i + 1:05}-of-00002.safetensors"
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def megatron(folder: Path) -> None:
    """A checkpoint of ours, handed to Megatron-LM."""
    checkpoint(folder)
    _call(folder, "tools/convert_checkpoint.py", "--load ck --to-megatron meg")


def traces(folder: Path) -> None:
    """Write the traces of two ranks, as torch's profiler writes them."""
    from megapipe.schedule import build, simulate

    folder = folder / "tr"
    folder.mkdir()
    schedule = build("1f1b", 2, 4)
    timeline = simulate(schedule)
    for rank, row in enumerate(schedule.ranks):
        passes = [(str(p), timeline.start[p], timeline.end[p]) for (p,) in row]
        many = [(n, a + 100 * i, b + 100 * i) for i in range(2) for n, a, b in passes]
        kept = {"ph": "X", "cat": "user_annotation", "pid": 7, "tid": 1}
        events = [kept | {"name": n, "ts": a, "dur": b - a} for n, a, b in many]
        content = json.dumps({"baseTimeNanoseconds": 1000, "traceEvents": events})
        (folder / f"rank-{rank}.json").write_text(content)
    packed = gzip.compress((folder / "rank-0.json").read_bytes(), 1, mtime=0)
    (folder / "rank-0.json.gz").write_bytes(packed)
    (folder / "rank-0.json").unlink()
