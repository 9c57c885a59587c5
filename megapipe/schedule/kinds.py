"""The kinds of pass: what each one needs, produces and holds, and which stream of a rank it uses.

Clock, verifier, lowering, pictures, files and executor read these rows. A new kind is a row here
and an entry in its family in `pipeline_parallel.families`. It has a field in the costs of its
family, unless another field is its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Self


class Lane(StrEnum):
    """A stream of a rank: arithmetic, data-parallel collectives, copies to the host and back.

    Passes of one stream run one after another in the order of the table. Streams run concurrently.
    """

    COMPUTE = "compute"
    DP = "dp"
    D2H = "d2h"
    H2D = "h2d"


COPIES = {Lane.D2H, Lane.H2D}
"""Streams of copies between device and host.

A copy starts when the passes before it in the row have ended. Ranks with a common PCIe switch may
share such a stream, see `passes.Shared`.
"""


class Made(StrEnum):
    """The results that a pass can produce for other passes."""

    OUTPUT = "output"
    KEYS = "keys and values"
    KEYS_GRADIENT = "gradient of keys and values"
    GRADIENT = "gradient of the input"
    WEIGHT_GRADIENT = "gradient of the weights"
    REDUCED = "reduced gradient"
    UPDATED = "updated share"
    GATHERED = "gathered weights"
    VALIDATED = "validated update"
    LOOKED_UP = "share of the embedded tokens"
    SHARE = "share of the loss and of its gradient"
    LOSS = "loss"
    HEAD_GRADIENT = "gradient of the head's share"
    ROWS_GRADIENT = "gradient of the embedding's share"
    ON_HOST = "activations on the host"
    BACK = "activations in place again"
    KEYS_BACK = "keys and values in place again"
    WEIGHTS = "gathered weights of the stage, for a run of passes"
    SCATTERED = "share of the gradient of a run"
    COPIED = "copy of the state on a peer"


class Where(StrEnum):
    """The passes that produce a needed result, seen from the pass that needs it.

    A pass of a whole stage is numbered by its training step, any other pass by its microbatch. "The
    same number" means the same step or microbatch.
    """

    OWN = "the same stage, the same number"
    PREV = "the previous stage; nothing at the embedding"
    NEXT = "the next stage; nothing at the loss"
    STEP = "the same stage, the training step of this microbatch"
    MICROBATCHES = "the stage and its replicas, every microbatch of the step"
    REPLICAS = "the stage and its replicas, the same number"
    RANK = "every stage of the rank, the same number"
    EVERYWHERE = "every stage, the same number"
    EMBEDS = "the stages that embed tokens: the first, and depths of multi-token prediction"
    LOSSES = "the stages with a loss: the last, and depths of multi-token prediction"
    SHARES = "every rank's share of the vocabulary; none where the vocabulary is not shared"
    EARLIER = "the same stage, the previous slice of the document; nothing at the first"
    LATER = "the same stage, the next slice of the document; nothing at the last"
    BEHIND = "the same stage, all later slices of the document"
    RUN = "the same stage, the run of passes to which this pass belongs"


OF_SLICES = {Where.EARLIER, Where.LATER, Where.BEHIND}
"""Needs that exist only in tables whose microbatches are cut into slices."""
HANDED = {Where.PREV, Where.NEXT, Where.EMBEDS, Where.LOSSES, Where.SHARES}
"""Needs that are met by a tensor from another stage: a message if that stage is on another rank."""


class Need(NamedTuple):
    """A result that must exist before a pass can start.

    Attributes:
        made: the result.
        where: the passes that produce it, seen from the pass that needs it.
        back: number of training steps before this one.
        optional: applies only if the table has a pass that produces the result.
        unless: letters of a kind of pass; the need applies only in tables without this kind.
        at: the need applies only to passes on these stages; None for all stages.
    """

    made: Made
    where: Where
    back: int = 0
    optional: bool = False
    unless: str | None = None
    at: Where | None = None


@dataclass(frozen=True)
class Traits:
    """The properties of a kind of pass, as simulation, verification and pictures use them.

    Attributes:
        meaning: the kind in words, for legends.
        colour: #rrggbb in pictures.
        costs: the duration of the pass is the sum of these fields of `Costs`, one letter for each.
        needs: results that must exist before a pass can start.
        makes: results that a pass produces; the first one is sent to other ranks.
        memory: change of the memory held, as {letter: count}: {"b": -1, "w": 1} frees `Costs.mem_b`
            and takes `Costs.mem_w`. If the first count is positive the change applies at the start
            of the pass, else at its end.
        per_stage: runs once per training step and stage, and not once per microbatch.
        at: for the kinds of a shared vocabulary, the stages that run them. None for all other
            kinds, which every stage may run.
        reads: takes the next microbatch from the data iterator.
        evaluates: is also part of an evaluation, which updates nothing.
        repeats: a second run leaves the same state as the first. This holds for every kind that
            `evaluates` too.
        posted: it starts only after the compute pass before it in the row, even if its own stream
            is free earlier.
        further: the pass may belong to the step that follows the table's last training step.
        border: no message is in flight while it runs, because the passes before it may have to run
            again.
    """

    meaning: str
    colour: str
    costs: str
    needs: tuple[Need, ...]
    makes: tuple[Made, ...]
    memory: Mapping[str, int] = field(default_factory=dict)
    lane: Lane = Lane.COMPUTE
    """The stream it runs on."""
    per_stage: bool = False
    at: Where | None = None
    reads: bool = False
    evaluates: bool = False
    repeats: bool = False
    posted: bool = False
    further: bool = False
    border: bool = False


_OF_WEIGHTS = {Made.WEIGHT_GRADIENT, Made.HEAD_GRADIENT, Made.ROWS_GRADIENT}
_VALID = Need(Made.VALIDATED, Where.STEP, optional=True)
_GATHERED = Need(Made.GATHERED, Where.STEP, optional=True)
# Slices of one document share keys and values. F of a slice stores its own; F and B of later slices
# read them and add to their gradients; B of the slice itself comes last and frees them.
_PREFIX = Need(Made.KEYS, Where.EARLIER)
_SUFFIX = Need(Made.KEYS_GRADIENT, Where.LATER)
# Nobody reads keys between the last F of a document and its first B. So O of the last slice copies
# the keys of all slices, and its L brings them back. With an attention window, or with documents
# that end earlier, keys leave with the last slice that attends to them. R reads keys too, so it
# waits for L of all later slices.
_KEYS_BACK = Need(Made.KEYS_BACK, Where.BEHIND, optional=True)
# With sharded weights a pass that reads weights waits for the gather before its run of passes. A
# pass that starts a new gradient waits until the previous gradient has been reduced.
_WHOLE = Need(Made.WEIGHTS, Where.RUN, optional=True)
_FREE = Need(Made.SCATTERED, Where.RUN, optional=True)
_LOOKED_UP = Need(Made.LOOKED_UP, Where.SHARES, at=Where.EMBEDS)
_LOSS = Need(Made.LOSS, Where.OWN, optional=True, at=Where.LOSSES)
_BACK = Need(Made.BACK, Where.OWN, optional=True)

_FORWARD = Need(Made.OUTPUT, Where.PREV), _LOOKED_UP, _GATHERED, _PREFIX, _WHOLE
_BACKWARD = (
    Need(Made.OUTPUT, Where.OWN),
    Need(Made.GRADIENT, Where.NEXT),
    _LOSS,
    _VALID,
    _SUFFIX,
    _BACK,
    _WHOLE,
    _FREE,
)
_WEIGHTS = Need(Made.GRADIENT, Where.OWN), _FREE
_OUTPUT = Made.OUTPUT, Made.KEYS
_INPUT = Made.GRADIENT, Made.KEYS_GRADIENT
_BOTH = *_INPUT, Made.WEIGHT_GRADIENT
_REDUCE = (
    Need(Made.WEIGHT_GRADIENT, Where.MICROBATCHES),
    Need(Made.HEAD_GRADIENT, Where.MICROBATCHES, optional=True),
    Need(Made.ROWS_GRADIENT, Where.MICROBATCHES, optional=True),
)
# With V in the table an update waits for its own rank only. V checks all other ranks' gradients in
# the next step, and takes the update back if they overflow.
_COPIED = Need(Made.COPIED, Where.RANK, optional=True)
_UPDATE = Need(Made.REDUCED, Where.RANK), Need(Made.REDUCED, Where.EVERYWHERE, unless="V"), _COPIED
# back=1: step n gathers the weights that step n - 1 has updated on each replica.
_GATHER = (Need(Made.UPDATED, Where.REPLICAS, back=1, optional=True),)
_VALIDATE = (
    Need(Made.REDUCED, Where.EVERYWHERE, back=1, optional=True),
    Need(Made.GATHERED, Where.RANK, optional=True),
)
# Optional, because an evaluation leaves out the depths of multi-token prediction.
_SHARE = Need(Made.OUTPUT, Where.LOSSES, optional=True), _GATHERED
_COMBINE = (Need(Made.SHARE, Where.SHARES),)
_OWN = (Need(Made.OUTPUT, Where.OWN),)
_AGAIN = Need(Made.OUTPUT, Where.OWN), _WHOLE, _KEYS_BACK
_GATHER_RUN = (Need(Made.UPDATED, Where.STEP, back=1, optional=True),)
_REDUCE_RUN = (Need(Made.WEIGHT_GRADIENT, Where.RUN),)
_ON_HOST = (Need(Made.ON_HOST, Where.OWN),)
_HEAD = Need(Made.SHARE, Where.OWN), Need(Made.LOSS, Where.LOSSES), _VALID
_ROWS = Need(Made.LOOKED_UP, Where.OWN), Need(Made.GRADIENT, Where.EMBEDS), _VALID

_ALL = Where.SHARES
_of_stage = partial(Traits, per_stage=True)
_copy = partial(Traits, repeats=True, posted=True)
_of_run = partial(Traits, lane=Lane.DP, posted=True)
_of_links = partial(_of_stage, lane=Lane.DP, repeats=True)


class Kind(StrEnum):
    """A kind of pass, named by one or two letters.

    For each microbatch and stage: F is the forward, B the gradient of the input, W the gradient of
    the weights, and BW both at once, as autograd does. Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism", sec. 2, split the backward into B and W.

    Once per training step and stage: G reduces the gradients over data parallelism. U updates the
    rank's shard of the weights. A gathers the updated weights for step n. V validates the update of
    step n - 1. P copies the optimizer's state after step n - 1 to the memory of a peer.

    For each microbatch, where ranks share the vocabulary: E looks up the rank's rows of the
    embedding. S multiplies with its rows of the head and computes its part of softmax and input
    gradient. C combines the parts into loss and gradient at the end of the model. T and EW are the
    gradients of the rows of head and embedding.

    For each microbatch with offload or recomputation: O copies its activations to the host. L
    copies them back, R recomputes them.

    For consecutive passes of one stage (a run), as often as the table says: AF and AB gather the
    stage's weights over data parallelism. AF and AB carry the number of the first pass of the run,
    which is a forward for AF and any other pass for AB. RS reduce-scatters all gradients
    accumulated since the previous RS, and carries the number of the last pass that added to them.
    See `families.sharding.runs`.

    The properties of a kind are its `traits`.
    """

    _value_: str
    traits: Traits

    def __new__(cls, letter: str, traits: Traits | None = None) -> Self:
        assert traits is not None  # Kind("F") looks a member up and creates none
        kind = str.__new__(cls, letter)
        kind._value_ = letter
        kind.traits = traits
        return kind

    F = (
        "F",
        Traits("forward", "#2166b0", "f", _FORWARD, _OUTPUT, {"b": 1}, evaluates=True, reads=True),
    )
    B = "B", Traits("input gradient", "#f2a93b", "b", _BACKWARD, _INPUT, {"b": -1, "w": 1})
    W = "W", Traits("weight gradient", "#2f9e77", "w", _WEIGHTS, (Made.WEIGHT_GRADIENT,), {"w": -1})
    BW = "BW", Traits("both gradients", "#b8471b", "bw", _BACKWARD, _BOTH, {"b": -1})

    # Their order in a step: G, U, A. V of this step runs among the forwards of the next one.
    G = "G", _of_stage("reduce gradients", "#9900ff", "g", _REDUCE, (Made.REDUCED,), lane=Lane.DP)
    U = "U", _of_stage("update", "#332233", "u", _UPDATE, (Made.UPDATED,))
    A = "A", _of_links("gather weights", "#84e4b4", "a", _GATHER, (Made.GATHERED,), further=True)
    V = "V", _of_stage("validate", "#480000", "v", _VALIDATE, (Made.VALIDATED,), border=True)
    P = "P", _of_links("copy to a peer", "#781800", "p", (_VALID,), (Made.COPIED,), posted=True)

    E = (
        "E",
        Traits(
            "look up rows",
            "#f0f018",
            "e",
            (_GATHERED,),
            (Made.LOOKED_UP,),
            at=_ALL,
            evaluates=True,
            reads=True,
        ),
    )
    S = (
        "S",
        Traits(
            "vocabulary share",
            "#f048f0",
            "s",
            _SHARE,
            (Made.SHARE,),
            {"s": 1},
            at=_ALL,
            evaluates=True,
        ),
    )
    C = (
        "C",
        Traits(
            "combine shares",
            "#60006c",
            "e",
            _COMBINE,
            (Made.LOSS,),
            at=Where.LOSSES,
            evaluates=True,
        ),
    )
    T = (
        "T",
        Traits(
            "weight gradient of the share",
            "#e4a8f0",
            "t",
            _HEAD,
            (Made.HEAD_GRADIENT,),
            {"s": -1},
            at=_ALL,
        ),
    )
    EW = "EW", Traits("gradient of rows", "#1824a8", "e", _ROWS, (Made.ROWS_GRADIENT,), at=_ALL)

    O = "O", _copy("offload", "#ccf09c", "o", _OWN, (Made.ON_HOST,), {"o": -1}, lane=Lane.D2H)
    L = (
        "L",
        _copy(
            "load again",
            "#a8a860",
            "l",
            _ON_HOST,
            (Made.BACK, Made.KEYS_BACK),
            {"o": 1},
            lane=Lane.H2D,
        ),
    )
    R = (
        "R",
        Traits(
            "forward again", "#606084", "f", _AGAIN, (Made.BACK,), {"b": 1, "r": -1}, repeats=True
        ),
    )

    # The collectives of A and G, more than once a step. No table has both, so they share colours.
    AF = (
        "AF",
        _of_run(
            "gather for a run",
            "#84e4b4",
            "a",
            _GATHER_RUN,
            (Made.WEIGHTS,),
            repeats=True,
            evaluates=True,
        ),
    )
    AB = (
        "AB",
        _of_run(
            "gather for a run back", "#84e4b4", "a", _GATHER_RUN, (Made.WEIGHTS,), repeats=True
        ),
    )
    RS = "RS", _of_run("reduce-scatter of a run", "#9900ff", "g", _REDUCE_RUN, (Made.SCATTERED,))

    # The hash of Enum runs in Python, and passes are keys of large dicts.
    __hash__ = str.__hash__

    @property
    def is_gradient_of_weights(self) -> bool:
        """Return whether the pass adds to the gradient of weights of its stage."""
        return not _OF_WEIGHTS.isdisjoint(self.traits.makes)

    @property
    def is_forward(self) -> bool:
        """Return whether the pass produces the stage's output, which the next stage takes."""
        return Made.OUTPUT in self.traits.makes

    @property
    def is_backward(self) -> bool:
        """Return whether the pass produces the input gradient, which the previous stage takes."""
        return Made.GRADIENT in self.traits.makes

    @property
    def is_split(self) -> bool:
        """Return whether the pass is a backward that leaves the weight gradient to a later pass."""
        return self.is_backward and Made.WEIGHT_GRADIENT not in self.traits.makes


LAYERS = (Kind.F, Kind.B, Kind.W, Kind.BW)
"""The passes through a stage's layers. Every table has them; other kinds are added."""
