"""One training run of a tiny GPT, its settings and data: what the equality tests and the fuzzer
compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megapipe.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
)
from megapipe.config.parallel.offload import Module
from megapipe.schedule import Costs, Schedule, from_csv, from_json, to_csv, to_json
from megapipe.schedule.catalogue import entry_of
from megapipe.schedule.families.vocabulary.shares import all_shared, with_vocabulary
from megapipe.schedule.shapes.depths import with_depths
from tools.proofs.families.styles import EXPERTS, PARTS, STYLES
from tools.proofs.tables.built import built
from tools.proofs.tables.drawn import joined
from tools.proofs.tables.moved import SHARDING, moved, sharded

STEPS, SEQ, VOCAB, LR = 3, 8, 32, 1e-2
EOD = VOCAB - 1
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full"},
    "uniform-2": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "block-1": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective"},
    "modules": {
        "recompute_granularity": "selective",
        "recompute_modules": ("mlp", "layernorm", "moe", "mla_up_proj"),
    },
    "partial": {
        "recompute_granularity": "full",
        "num_microbatches_with_partial_activation_checkpoints": 1,
    },
}
# Of layers 0, 1, ... in turn.
OVERRIDES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "widths": [{"ffn_hidden_size": 40}, {}, {"kv_channels": 6, "window_size": "1,0"}],
    "halves": [{"no_mlp": True}, {"no_attention": True}, {"attention_dropout": 0.3}],
    "kinds": [
        {"normalization": "RMSNorm", "swiglu": True, "ffn_hidden_size": 24},
        {"qk_layernorm": True, "hidden_dropout": 0.0},
    ],
}
_PLAIN: dict[str, Any] = dict.fromkeys(("recompute", "sharding", "metrics", "memory"), "none")
_OFTEN: dict[str, Any] = {"loss_scale_window": 1, "hysteresis": 1}
# What else loss_func reports.
METRICS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "none": lambda trains: {},
    "mean": lambda trains: {"accuracy": torch.tensor(0.5)},
    "pair": lambda trains: {"accuracy": (3.0, 7)},
    "empty": lambda trains: {"a": torch.zeros(2), "zz": (0.0, 0.0)},
    "nan": lambda trains: {"a": float("nan"), "zz": torch.tensor([float("inf"), 1.0])},
    "training": lambda trains: {"a": 1.0} if trains else {"b": (2.0, 1.0)},
}


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        drawn: seed of a table of tools/proofs/tables/drawn.py that takes the place of the
            schedule's.
        microbatches: per data-parallel rank; each of `batch` sequences.
        chunks: stages per rank where the schedule leaves a choice.
        layers: of each position of the chain; a position may have none.
        way: how keys and values meet queries where cp ranks share sequences.
        p2p: how messages are posted, see pipeline_parallel.transport.
        file: the schedule goes through a "json" or "csv" file first.
        variable: the microbatches differ in length.
        distributed: optimizer state is split over data parallel.
        sharding: "grads" or "weights" too are split over data parallel, but while passes use them;
            living: an `UnshardedStages`, None for whole steps.
        overlap: gradients are reduced, and with `distributed` weights gathered, beside the passes.
        buckets: in which each stage's gradients are reduced then.
        dtype: of weights and activations; float16 trains with a dynamic loss scale from
            `loss_scale` on, which doubles with each step.
        vocabulary: the ranks of the pipeline share it.
        paired: passes run together, wherever that would pay if three tenths were communication.
            joined: or by a seed.
        memory: what is copied to the host or computed again, see tables/moved.py; modules: of
            --offload-modules.
        experts: what the layers have in place of an MLP.
        parts: what else differs from the style, see PARTS.
        ep, etp: how these lie over ranks; etp is tp by default. dispatcher: how tokens reach them.
        skips: of --window-attn-skip-freq.
        documents: none, "attention", "positions" or "both" restart at an end of document.
        slices: lengths of the slices of a microbatch; () leaves it whole. follows: their cuts go to
            ends of documents.
        depths: the rank of each depth of multi-token prediction.
        metrics: of METRICS, or "first" for a view of the output.
        moved: seed by which initial weights are moved by at most an ulp; 0 leaves them.
    """

    schedule: str
    pp: int
    microbatches: int
    layers: tuple[int, ...]
    chunks: int | None = None
    tp: int = 1
    cp: int = 1
    way: str = "p2p"
    dp: int = 1
    style: str = "gpt2"
    tied: bool = True
    recompute: str = "none"
    sequence_parallel: bool = False
    per_token_loss: bool = False
    p2p: str = "plain"
    file: str | None = None
    variable: bool = False
    distributed: bool = False
    sharding: str = "none"
    living: tuple[int, int, bool] | None = None
    overlap: bool = False
    dtype: str = "float64"
    steps: int = STEPS
    batch: int = 1
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    fused: bool = False
    metrics: str = "none"
    documents: str = "none"
    window: int | None = None
    skips: str | None = None
    overrides: str = "none"
    loss_scale: float = 1.0
    compile: bool = False
    vocabulary: bool = False
    paired: bool = False
    joined: int | None = None
    memory: str = "none"
    modules: tuple[Module, ...] = ()
    drawn: int | None = None
    buckets: int = 1
    experts: str = "none"
    parts: str = "none"
    ep: int = 1
    etp: int | None = None
    dispatcher: Literal["allgather", "alltoall"] = "allgather"
    slices: tuple[int, ...] = ()
    follows: bool = False
    depths: tuple[int, ...] = ()
    moved: int = 0

    @property
    def whole(self) -> Case:
        """The same training on one process, in the same slices."""
        reported = "first" if self.metrics == "first" else "none"
        return replace(
            self,
            schedule="naive",
            pp=1,
            microbatches=self.microbatches * self.dp,
            layers=(sum(self.layers),),
            chunks=None,
            tp=1,
            cp=1,
            way="p2p",
            dp=1,
            sequence_parallel=False,
            p2p="plain",
            file=None,
            distributed=False,
            living=None,
            overlap=False,
            compile=False,
            vocabulary=False,
            paired=False,
            modules=(),
            drawn=None,
            buckets=1,
            ep=1,
            etp=None,
            depths=(0,) * len(self.depths),
            **_PLAIN | {"metrics": reported},
        )

    @property
    def same_bits(self) -> bool:
        """Is every number the sum of the same terms in the same order as in one process?"""
        one = self.tp == self.cp == self.dp == 1 and not (self.compile or self.vocabulary)
        return one and self.drawn is None and entry_of(self.schedule).copies == 1

    @property
    def config(self) -> Config:
        layers, turns = sum(self.layers), OVERRIDES[self.overrides]
        overrides = {str(n): turns[n % len(turns)] for n in range(layers)} if turns else None
        return Config(
            model=ModelConfig(
                num_layers=layers,
                hidden_size=16,
                num_attention_heads=4,
                max_position_embeddings=SEQ,
                padded_vocab_size=VOCAB,
                untie_embeddings_and_output_weights=not self.tied,
                sequence_parallel=self.sequence_parallel,
                cp_comm_type=(self.way,),
                attention_dropout=self.attention_dropout,
                hidden_dropout=self.hidden_dropout,
                cross_entropy_loss_fusion=self.fused,
                window_size=None if self.window is None else f"{self.window},0",
                window_attn_skip_freq=self.skips,
                per_layer_overrides=json.dumps(overrides) if overrides else None,
                **STYLES[self.style] | PARTS[self.parts],
                **RECOMPUTE[self.recompute],
                **EXPERTS[self.experts],
                moe_token_dispatcher_type=self.dispatcher,
                mtp_num_layers=len(self.depths) or None,
                mtp_loss_scaling_factor=0.5,
            ),
            parallel=ParallelConfig(
                *(self.tp, self.pp, self.cp, self.ep, self.etp),
                pipeline_schedule=self.schedule,
                no_overlap_p2p_communication=self.p2p == "batched",
                use_ring_exchange_p2p=self.p2p == "ring",
                pipeline_slice_cuts="documents" if self.follows else "work",
                use_distributed_optimizer=self.distributed,
                **SHARDING[self.sharding],
                overlap_grad_reduce=self.overlap,
                ddp_num_buckets=self.buckets if self.overlap and self.buckets > 1 else None,
                overlap_param_gather=self.overlap and self.distributed,
                offload_modules=self.modules,
            ),
            batch=BatchConfig(
                micro_batch_size=self.batch,
                global_batch_size=self.microbatches * self.dp * self.batch,
                seq_length=SEQ,
                train_iters=self.steps,
                calculate_per_token_loss=self.per_token_loss,
            ),
            optimizer=OptimizerConfig(lr=LR),
            precision=PrecisionConfig(
                bf16=self.dtype == "bfloat16",
                fp16=self.dtype == "float16",
                initial_loss_scale=self.loss_scale,
                **_OFTEN,
            ),
            data=DataConfig(
                mock_data=True,
                tokenizer_type="NullTokenizer",
                vocab_size=VOCAB - 1,
                eod_mask_loss=True,
                reset_attention_mask=self.documents in ("attention", "both"),
                reset_position_ids=self.documents in ("positions", "both"),
            ),
            world_size=self.tp * self.cp * self.dp * self.pp,
        )

    def sample(self, number: int) -> Tensor:
        """[s + 1] token ids; s is SEQ, or one of two lengths."""
        length = SEQ - 4 * (number % 2) if self.variable else SEQ
        tokens = torch.randint(
            0, VOCAB, (length + 1,), generator=torch.Generator().manual_seed(number)
        )
        return tokens if self.documents == "none" else tokens.masked_fill_(tokens % 4 == 0, EOD)

    def reporting(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """The same forward_step, whose loss_func reports more."""

        def step(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
            output, loss_func = forward_step(data, model)
            if loss_func is None:
                return output, None

            def more(output: Tensor) -> tuple[Any, ...]:
                *training, reported = loss_func(output)
                if self.metrics == "first":
                    return *training, reported | {"first": output.view(-1)[0]}
                return *training, reported | METRICS[self.metrics](model.training)

            return output, more

        return step


def table(case: Case) -> Schedule:
    """The case's schedule. Raises: ScheduleError if there is none for these numbers."""
    of_table = ("chunks", "drawn", "paired", "slices")
    plain = built(
        case.schedule,
        case.pp,
        case.microbatches,
        **{name: getattr(case, name) for name in of_table},
    )
    plain = plain if case.joined is None else joined(plain, case.joined)
    ends = Costs(s=0.5, t=0.25)
    if case.depths:
        shared = all_shared if case.vocabulary else None
        plain = with_depths(plain, case.depths, ends, shared=shared)
    elif case.vocabulary:
        plain = with_vocabulary(plain, ends)
    made = sharded(moved(plain, case.memory), case.sharding, case.living)
    if case.file is None or (case.depths and case.file == "csv"):  # which says nothing of depths
        return made
    if case.file == "json":
        return from_json(to_json(made))
    return replace(from_csv(to_csv(made)), cuts=made.cuts)
