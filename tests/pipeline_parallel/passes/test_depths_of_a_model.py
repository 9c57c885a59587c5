"""Depths of multi-token prediction beside the formula of DeepSeek-V3's report, section 2.2, in plain float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megapipe.config import ModelConfig
from megapipe.data.loader import make_batch
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.gpt import GPTModel
from megapipe.models.mtp import whole_features
from megapipe.partition.spans import whole
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.schedule.shapes.depths import with_depths
from megapipe.tensor_parallel.rng import initialize
from megapipe.training.forward_step import forward_step

H, VOCAB, SEQ, WEIGHT = 16, 32, 8, 0.3
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=2,
    ffn_hidden_size=24,
    max_position_embeddings=SEQ,
    padded_vocab_size=VOCAB,
    untie_embeddings_and_output_weights=True,
    normalization="RMSNorm",
    attention_dropout=0.0,
    hidden_dropout=0.0,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=WEIGHT,
)


def built() -> list[GPTModel]:
    pieces = [GPTModel(MODEL, span, Axis()).double() for span in whole(MODEL.layers, MODEL.depths)]
    for piece in pieces:
        initialize(piece, 1, Axis())
    return pieces


def rolled(x, by):
    """Megatron-LM's roll: to the left, zeros at the end."""
    y = torch.roll(x, -by, 1)
    y[:, y.shape[1] - by :] = 0
    return y


def written_out(model, further, batch):
    """The losses by the formula: of the model's own next tokens, then of each depth."""
    norm = lambda x, part: F.rms_norm(x, (H,), part.weight, MODEL.norm_epsilon)  # noqa: E731
    model(batch.tokens, batch.position_ids, labels=batch.labels)
    hidden, losses = model.take_hidden_states(), []
    words, positions = model.embedding.word_embeddings.weight, model.embedding.position_embeddings.weight
    for depth, piece in enumerate([model, *further]):
        tokens, labels, mask = (rolled(x, depth) for x in (batch.tokens, batch.labels, batch.loss_mask))
        if depth:
            (layer,) = piece.mtp.layers.values()
            embedded = (words[tokens] + positions[rolled(batch.position_ids, depth)]).transpose(0, 1)
            joined = torch.cat((norm(embedded, layer.enorm), norm(hidden, layer.hnorm)), -1) @ layer.eh_proj.weight.t()
            hidden = norm(layer.mtp_model_layer(joined), layer.final_layernorm)
        logits = (hidden @ model.output_layer.weight.t()).transpose(0, 1)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(mask)
        losses.append((each * mask).sum() / mask.sum())
    return losses


def test_two_depths_have_the_losses_and_gradients_of_the_formula():
    draws = torch.randint(0, VOCAB, (3, 2, SEQ + 1), generator=torch.Generator().manual_seed(5))
    batches = [make_batch(tokens, 0, eod_mask_loss=True) for tokens in draws]
    model, *further = built()
    wanted = [written_out(model, further, batch) for batch in batches]
    sum(main + WEIGHT / 2 * (one + two) for main, one, two in wanted).div(3).backward()
    of_formula = {name: p.grad for piece in (model, *further) for name, p in piece.named_parameters()}

    stages = built()
    table = with_depths(build("1f1b", 1, 3), (0, 0))
    reported = ForwardBackward(ProcessMesh.single(), table, config=MODEL)(
        forward_step_func=forward_step,
        data_iterator=[iter([batch.ahead(depth) for batch in batches]) for depth in range(3)],
        model=stages,
        num_microbatches=3,
        seq_length=SEQ,
        micro_batch_size=2,
    )
    for (main, one, two), said in zip(wanted, reported, strict=True):
        total, count = said["lm loss"]
        torch.testing.assert_close(total / count, main.detach())
        assert [float(said[f"mtp_{n} loss"][0]) for n in (1, 2)] == pytest.approx([one.item(), two.item()], rel=1e-12)
    grads = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    for name, of in (("word_embeddings", "embedding.word_embeddings.weight"), ("heads", "output_layer.weight")):
        uses = [key for key in grads if name in key or key == of]
        torch.testing.assert_close(sum(grads.pop(key) for key in uses), of_formula[of], rtol=1e-12, atol=1e-15)
    for name in [name for name in grads if "position" not in name]:
        torch.testing.assert_close(grads[name], of_formula[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shares_sequence", [False, True])
def test_features_are_gathered_and_their_gradient_is_cut_again(shares_sequence):
    whole_x = torch.arange(4 * 1 * 6.0).view(4, 1, 6)

    def rank(mesh):
        mine = whole_x.chunk(2, -1)[mesh.tp.rank].clone().requires_grad_()
        y = whole_features(mine, mesh.tp, shares_sequence)
        wanted = whole_x.chunk(2)[mesh.tp.rank] if shares_sequence else whole_x
        (y * wanted).sum().backward()
        return torch.equal(y, wanted) and torch.equal(mine.grad, mine)

    assert run_threads(partial(rank), tp=2) == [True, True]
