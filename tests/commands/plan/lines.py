"""Lines of flags to plan, and what the plan's JSON says of them."""

import json

from megapipe.commands.main import command

MODEL = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 2000 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 "
    "--lr 1e-3 --pipeline-model-parallel-size 2"
)
DENSE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
DENSE += " --mock-data --lr 1 --train-iters 9 --tokenizer-type NullTokenizer --vocab-size 32000 --bf16 --rates h100"
DENSE += " --micro-batch-size 1 --global-batch-size 64 --world-size 8 --memory-gib 80"


def told(line: list[str], capsys) -> dict:
    command("plan")([*line, "--json", "-"])
    return json.loads(capsys.readouterr().out)
