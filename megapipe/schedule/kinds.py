"""Kinds of pass, each in one place: where it runs, what it needs, what it leaves for others, what it holds.

Clock, verifier, lowering, pictures, files and executor read these rows; a new kind is a row here, an entry in its
family in `pipeline_parallel.families`, and a field of that family's costs if no other is its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Self


class Lane(StrEnum):
    """A resource of a rank. Passes of one lane run one after another, in the order of the table; lanes side by side."""

    COMPUTE = "compute"
    DP = "dp"
    D2H = "d2h"
    H2D = "h2d"


COPIES = {Lane.D2H, Lane.H2D}
"""Lanes to the host and back. A copy begins where it stands in the row, when what stands before it there is over; ranks
behind one switch may share such a lane, see `passes.Shared`."""


class Made(StrEnum):
    """Results that a pass leaves for others."""

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
    WEIGHTS = "weights of the stage, whole for a run"
    SCATTERED = "share of the gradient of a run"


class Where(StrEnum):
    """Whose result is meant. A pass of a stage as a whole is numbered by its step, others by their microbatch."""

    OWN = "the stage's own, of the same number"
    PREV = "of the stage before, nothing at the embedding"
    NEXT = "of the stage behind, nothing at the loss"
    STEP = "the stage's own, of the step that the microbatch is of"
    MICROBATCHES = "the stage's and its replicas', of every microbatch of the step"
    REPLICAS = "the stage's and its replicas', of the same number"
    RANK = "of every stage of the rank, of the same number"
    EVERYWHERE = "of every stage, of the same number"
    EMBEDS = "of the stages that embed tokens, depths behind the first, of the same number"
    LOSSES = "of the stages with a loss, depths behind the last, of the same number"
    SHARES = "of every rank's share of the vocabulary, of the same number; none where it is not shared"
    EARLIER = "the stage's own, of the slice before; nothing at the first"
    LATER = "the stage's own, of the slice behind; nothing at the last"
    BEHIND = "the stage's own, of all slices behind it in its document"
    RUN = "the stage's own, of the run of passes that it is in"


OF_SLICES = {Where.EARLIER, Where.LATER, Where.BEHIND}
"""Needs of tables alone that cut microbatches in slices."""
HANDED = {Where.PREV, Where.NEXT, Where.EMBEDS, Where.LOSSES, Where.SHARES}
"""Needs that are met by a tensor which another stage hands over."""


class Need(NamedTuple):
    """A need: a result that must be there before a pass can start.

    Attributes:
        back: steps before this one.
        optional: only if the table has the pass that makes it.
        unless: only in tables without this kind.
        at: only of the stages that this names.
    """

    made: Made
    where: Where
    back: int = 0
    optional: bool = False
    unless: str | None = None
    at: Where | None = None


@dataclass(frozen=True)
class Traits:
    """A row: everything that the machinery knows about a kind.

    Attributes:
        meaning: in words, for legends.
        colour: #rrggbb in pictures.
        costs: fields of `Costs` that its duration is the sum of, a letter each.
        memory: how often a field of `Costs` that begins with mem_ is taken, by the letter behind: when it starts if the
            first is positive, when it ends if negative.
        per_stage: once a step for a stage, not once for a microbatch.
        at: the only stages that have such a pass, where ranks share the vocabulary; None: every stage of any table.
        reads: takes the next microbatch of the data, the shares' own or that of both ends of the model.
        evaluates: part of an evaluation too, which updates nothing.
        repeats: a second run leaves what the first did, as that of every pass of an evaluation does.
        posted: begins where it stands in the row, when what stands before it there is over, though its lane is free.
        further: may be of the step behind the last of its table, or of the next table's first.
        border: no message is on its way while it runs: what stands before it may have to run again.
    """

    meaning: str
    colour: str
    costs: str
    needs: tuple[Need, ...]
    makes: tuple[Made, ...]
    memory: Mapping[str, int] = field(default_factory=dict)
    lane: Lane = Lane.COMPUTE
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
# A slice attends to the keys and values of those before it: F makes them, F and B of later slices read them, the B of
# their own slice frees them. Its gradients come to them meanwhile, so that they are whole when that B runs.
_PREFIX, _SUFFIX = Need(Made.KEYS, Where.EARLIER), Need(Made.KEYS_GRADIENT, Where.LATER)
# Between the last F of a document and its first B nobody reads them: the O of its last slice copies those of all, and
# its L brings them back, before that B and so before all others. In a run a window or a document may end sooner: keys
# leave with the last slice that sees them. So an R, which reads them too, waits for the L of all slices behind it.
_KEYS_BACK = Need(Made.KEYS_BACK, Where.BEHIND, optional=True)
# As long as weights are sharded a pass that reads them waits for the gather before its run, and one that begins a
# gradient for the reduction of the one before.
_WHOLE = Need(Made.WEIGHTS, Where.RUN, optional=True)
_FREE = Need(Made.SCATTERED, Where.RUN, optional=True)
_LOOKED_UP = Need(Made.LOOKED_UP, Where.SHARES, at=Where.EMBEDS)
_FORWARD = Need(Made.OUTPUT, Where.PREV), _LOOKED_UP, _GATHERED, _PREFIX, _WHOLE
_LOSS = Need(Made.LOSS, Where.OWN, optional=True, at=Where.LOSSES)
_BACK = Need(Made.BACK, Where.OWN, optional=True)
_BACKWARD = Need(Made.OUTPUT, Where.OWN), Need(Made.GRADIENT, Where.NEXT), _LOSS, _VALID, _SUFFIX, _BACK, _WHOLE, _FREE
_OUTPUT, _INPUT = (Made.OUTPUT, Made.KEYS), (Made.GRADIENT, Made.KEYS_GRADIENT)
_WEIGHTS = Need(Made.GRADIENT, Where.OWN), _FREE
_REDUCE = (
    Need(Made.WEIGHT_GRADIENT, Where.MICROBATCHES),
    Need(Made.HEAD_GRADIENT, Where.MICROBATCHES, optional=True),
    Need(Made.ROWS_GRADIENT, Where.MICROBATCHES, optional=True),
)
# With V in the table an update waits for its own rank alone; V reads what all others have in the next step.
_UPDATE = Need(Made.REDUCED, Where.RANK), Need(Made.REDUCED, Where.EVERYWHERE, unless="V")
# back=1: step n gathers what step n - 1 has updated, on every rank that has a share of it.
_GATHER = (Need(Made.UPDATED, Where.REPLICAS, back=1, optional=True),)
_VALIDATE = (
    Need(Made.REDUCED, Where.EVERYWHERE, back=1, optional=True),
    Need(Made.GATHERED, Where.RANK, optional=True),
)
_SHARE = Need(Made.OUTPUT, Where.LOSSES, optional=True), _GATHERED  # an evaluation runs no depths
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


class Kind(StrEnum):
    """A kind of pass: what it does.

    Of a microbatch: F forward, B input gradient, W weight gradient, BW both, as autograd does. Of a stage as a whole,
    once a step: G reduce its gradients over data parallel, U update the owned share, A gather the updated weights for
    step n, V validate the update of the step before. Of a microbatch where ranks share the vocabulary: E look up the
    rank's rows of the embedding, S its rows of the head with their part of softmax and input gradient, C combine all
    into loss and gradient at the end of the model, T and EW the gradients of the rows of head and embedding. Of a
    microbatch whose activations are in the way: O copies them to the host, L brings them back, R computes them again.
    Of a run of passes of a stage, as often as the table says: AF and AB gather its weights over data parallel, named by
    the run's first pass, a forward (AF) or another (AB); RS reduce-scatters the gradients that passes have left since
    the one before, named by the last of them. See `families.sharding.runs` for what is whole when.
    """

    _value_: str
    traits: Traits

    def __new__(cls, letter: str, traits: Traits | None = None) -> Self:
        assert traits is not None  # Kind("F") alone looks a member up and makes none
        kind = str.__new__(cls, letter)
        kind._value_ = letter
        kind.traits = traits
        return kind

    F = "F", Traits("forward", "#2166b0", "f", _FORWARD, _OUTPUT, {"b": 1}, evaluates=True, reads=True)
    B = "B", Traits("input gradient", "#f2a93b", "b", _BACKWARD, _INPUT, {"b": -1, "w": 1})
    W = "W", Traits("weight gradient", "#2f9e77", "w", _WEIGHTS, (Made.WEIGHT_GRADIENT,), {"w": -1})
    BW = "BW", Traits("both gradients", "#b8471b", "bw", _BACKWARD, (*_INPUT, Made.WEIGHT_GRADIENT), {"b": -1})

    G = "G", _of_stage("reduce gradients", "#9900ff", "g", _REDUCE, (Made.REDUCED,), lane=Lane.DP)
    U = "U", _of_stage("update", "#332233", "u", _UPDATE, (Made.UPDATED,))
    A = (
        "A",
        _of_stage(
            "gather weights", "#84e4b4", "a", _GATHER, (Made.GATHERED,), lane=Lane.DP, repeats=True, further=True
        ),
    )
    V = "V", _of_stage("validate", "#480000", "v", _VALIDATE, (Made.VALIDATED,), border=True)

    E = (
        "E",
        Traits("look up rows", "#f0f018", "e", (_GATHERED,), (Made.LOOKED_UP,), at=_ALL, evaluates=True, reads=True),
    )
    S = "S", Traits("vocabulary share", "#f048f0", "s", _SHARE, (Made.SHARE,), {"s": 1}, at=_ALL, evaluates=True)
    C = "C", Traits("combine shares", "#60006c", "e", _COMBINE, (Made.LOSS,), at=Where.LOSSES, evaluates=True)
    T = "T", Traits("weight gradient of the share", "#e4a8f0", "t", _HEAD, (Made.HEAD_GRADIENT,), {"s": -1}, at=_ALL)
    EW = "EW", Traits("gradient of rows", "#1824a8", "e", _ROWS, (Made.ROWS_GRADIENT,), at=_ALL)

    O = "O", _copy("offload", "#ccf09c", "o", _OWN, (Made.ON_HOST,), {"o": -1}, lane=Lane.D2H)
    L = "L", _copy("load again", "#a8a860", "l", _ON_HOST, (Made.BACK, Made.KEYS_BACK), {"o": 1}, lane=Lane.H2D)
    R = "R", Traits("forward again", "#606084", "f", _AGAIN, (Made.BACK,), {"b": 1, "r": -1}, repeats=True)

    # The collectives of A and G, more than once a step: never in one table with them, and drawn in their colours.
    AF = "AF", _of_run("gather for a run", "#84e4b4", "a", _GATHER_RUN, (Made.WEIGHTS,), repeats=True, evaluates=True)
    AB = "AB", _of_run("gather for a run back", "#84e4b4", "a", _GATHER_RUN, (Made.WEIGHTS,), repeats=True)
    RS = "RS", _of_run("reduce-scatter of a run", "#9900ff", "g", _REDUCE_RUN, (Made.SCATTERED,))

    # Enum's own hash runs in Python; passes are keys of large dicts.
    __hash__ = str.__hash__

    @property
    def is_gradient_of_weights(self) -> bool:
        """True for the passes that add into the gradient of weights of their stage."""
        return not _OF_WEIGHTS.isdisjoint(self.traits.makes)

    @property
    def is_forward(self) -> bool:
        """True for the passes that produce the output of the stage, which the next one takes."""
        return Made.OUTPUT in self.traits.makes

    @property
    def is_backward(self) -> bool:
        """True for the passes that produce the gradient of the stage's input, which the one before takes."""
        return Made.GRADIENT in self.traits.makes

    @property
    def is_split(self) -> bool:
        """True for a backward that leaves the gradient of the weights to a pass of its own."""
        return self.is_backward and Made.WEIGHT_GRADIENT not in self.traits.makes
