"""The data of a run, its tokenizer, and how the run is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import ANY, CONTENTS, FREE, FROM_0, FROM_1, NAMED, Idle, at_least, needs

EVALUATES = Idle(
    lambda c: c.data.eval_interval is None and not c.data.skip_train,
    "nothing is evaluated, without --eval-interval",
)
HAS_BATCHES = needs("eval_iters", "nothing is evaluated", least=1)
NULL = "NullTokenizer"
GPT2 = "GPT2BPETokenizer"
TIK = "TikTokenizer"
HUGGING = "HuggingFaceTokenizer"
SENTENCEPIECE = "SentencePieceTokenizer"
OTHER_FILES = Idle(
    lambda c: c.data.tokenizer in (NULL, GPT2),
    "it is not read, without a tokenizer that reads it",
)

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
]


def of_tokenizer(instead: str, *kinds: str) -> Idle:
    """Return the annotation of a field that only some kinds of tokenizer read.

    With any other kind the flag has no effect.

    Args:
        instead: a text on what happens with any other kind.
        kinds: the values of --tokenizer-type whose tokenizers read the field.
    """
    return Idle(lambda c: c.data.tokenizer not in kinds, f"{instead}, without {' or '.join(kinds)}")


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: Annotated[TokenizerType | None, NAMED] = None
    """Kind of tokenizer. Default: GPT2BPETokenizer with --vocab-file or --merge-file, else
    SentencePieceTokenizer."""
    tokenizer_model: Annotated[str | None, CONTENTS, OTHER_FILES] = None
    """The tokenizer's file: a SentencePiece model, a TikTokenizer's vocabulary, or a Hugging Face
    folder or tokenizer.json."""
    vocab_file: Annotated[str | None, CONTENTS, of_tokenizer("it is not read", GPT2)] = None
    """The vocab.json of the GPT2BPETokenizer."""
    merge_file: Annotated[str | None, CONTENTS, of_tokenizer("it is not read", GPT2)] = None
    """The merges.txt of the GPT2BPETokenizer."""
    vocab_size: Annotated[
        int | None,
        FROM_1,
        NAMED,
        of_tokenizer("the tokenizer knows its size", NULL, TIK),
    ] = None
    """Number of ids of the NullTokenizer, or of the TikTokenizer with its special ones."""
    null_tokenizer_eod_id: Annotated[
        int | None, ANY, NAMED, of_tokenizer("it has its own", NULL)
    ] = None
    """Id that ends a document under the NullTokenizer. Default: the last one."""
    tokenizer_hf_no_include_special_tokens: Annotated[
        bool, NAMED, of_tokenizer("a text gets none", HUGGING)
    ] = False
    """Do not let the HuggingFaceTokenizer add special ids to a text, such as one at its
    beginning."""
    tiktoken_pattern: Annotated[
        Literal["v1", "v2"], NAMED, of_tokenizer("there is nothing to cut", TIK)
    ] = "v2"
    """Pattern by which the TikTokenizer cuts a text before it merges pairs."""
    tiktoken_num_special_tokens: Annotated[
        int, ANY, NAMED, of_tokenizer("there is nothing to cut", TIK)
    ] = 1000
    """Number of special ids of the TikTokenizer, which come before its first byte string."""

    @property
    def tokenizer(self) -> str:
        """The kind of tokenizer: the value of --tokenizer-type, with one name for synonyms."""
        if self.tokenizer_type is None:
            return GPT2 if self.vocab_file or self.merge_file else SENTENCEPIECE
        # Three names of Megatron-LM for one kind of file.
        if self.tokenizer_type in ("GPTSentencePieceTokenizer", "Llama2Tokenizer"):
            return SENTENCEPIECE
        return self.tokenizer_type


@dataclass(frozen=True)
class DataConfig(TokenizerConfig):
    """The data, such as files and order of samples, and the evaluation."""

    # Files.
    # CONTENTS on --load: the files may have moved, and digests of them are compared.
    data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Data files without .bin and .idx. One prefix; or several, and each sample is
    read once; or WEIGHT PREFIX WEIGHT PREFIX ... for a blend."""
    data_args_path: Annotated[str | None, CONTENTS] = None
    """File that contains the arguments of --data-path."""
    train_data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Data to train on, written as --data-path. With it each split has files of its own, instead of
    --split."""
    valid_data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Data to validate on, written as --data-path."""
    test_data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Data to test on, written as --data-path."""
    per_split_data_args_path: Annotated[str | None, CONTENTS] = None
    """JSON file that contains the arguments of the three flags --train-data-path,
    --valid-data-path and --test-data-path: {"train": [...], "valid": [...], "test": [...]}."""
    split: Annotated[str | None, NAMED] = None
    """Proportions of train, validation and test. Default, with --data-path: 969,30,1."""
    data_cache_path: Annotated[str | None, FREE] = None
    """Folder that keeps the sample indices for the next start. Default: every start computes them
    anew."""
    mock_data: Annotated[bool, NAMED] = False
    """Train on synthetic tokens without data files. --tokenizer-type NullTokenizer --vocab-size N
    needs no file of a tokenizer either."""
    # Reading and order.
    # Another order or another split would train on some samples twice and never on others, so both
    # are NAMED on --load.
    num_workers: Annotated[int, FROM_0, FREE] = 2
    """Number of background threads that read ahead. 0: read in the training loop."""
    dataloader_type: Annotated[Literal["single", "cyclic"], NAMED] = "single"
    """Order of the samples. single: as in the sample index. cyclic: shuffled anew each epoch."""
    no_data_sharding: Annotated[
        bool, NAMED, needs("dataloader_type", "samples are read in order", "cyclic")
    ] = False
    """Shuffle all samples together under --dataloader-type cyclic. Default: shuffle a separate part
    for each data-parallel rank."""
    # Documents.
    eod_mask_loss: Annotated[bool, NAMED] = False
    """Leave out the loss where the input is the end-of-document token."""
    reset_position_ids: Annotated[bool, NAMED] = False
    """Count positions, learned or rotary, from 0 again after each end-of-document token."""
    reset_attention_mask: Annotated[bool, NAMED] = False
    """Let a token attend only to tokens of its own document."""
    # Evaluation.
    # FREE on --load: an evaluation changes no weight.
    eval_iters: Annotated[int, at_least(-1), FREE, EVALUATES] = 100
    """Number of batches per evaluation. 0 or -1: evaluate nothing."""
    eval_global_batch_size: Annotated[int | None, FROM_1, FREE, EVALUATES, HAS_BATCHES] = None
    """Number of sequences in a batch of an evaluation. Default: --global-batch-size."""
    eval_micro_batch_size: Annotated[int | None, FROM_1, FREE, EVALUATES, HAS_BATCHES] = None
    """Number of sequences in a microbatch of an evaluation. Default: --micro-batch-size."""
    eval_interval: Annotated[int | None, FROM_1, FREE, HAS_BATCHES] = None
    """Evaluate on validation data after every this many steps and at the end, where test data
    follows. Default: never."""
    start_eval_at_iter: Annotated[int | None, FROM_1, FREE, EVALUATES, HAS_BATCHES] = None
    """Evaluate from this step on. Default: from the first."""
    skip_train: Annotated[bool, FREE] = False
    """Train nothing. Evaluate the checkpoint of --load on validation and test data, each from its
    first sample."""

    @property
    def eval_batches(self) -> int:
        """The number of batches per evaluation."""
        return max(0, self.eval_iters)
