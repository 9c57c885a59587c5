"""Settings are compared by what they mean: written out or by default, in words of the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from short_run import config
from tiny import STYLES

from megapipe.checkpoint.resume import changed_settings, resume_problems, settings, unnamed
from megapipe.config import CheckpointConfig, Config
from megapipe.training.guards.ranks import TOKENS

GPT2, LLAMA = config(STYLES["gpt2"]), config(STYLES["llama"])


def saved(of: Config, **sections):
    """As a checkpoint has it, with other values in some sections."""
    content = json.loads(json.dumps(asdict(of)))
    return {**content, **{name: content[name] | values for name, values in sections.items()}}


def problems(there: Config, here: Config):
    return resume_problems(saved(there)["model"], json.loads(json.dumps(settings(there))), here, "iter_0000001")


@pytest.mark.parametrize(
    ("base", "written"),
    [
        (GPT2, {"ffn_hidden_size": 128}),
        (GPT2, {"kv_channels": 8}),
        (GPT2, {"group_query_attention": True, "num_query_groups": 4}),
        (GPT2, {"window_size": "(-1,0)"}),
        (GPT2, {"rotary_base": 5}),  # learned positions have none
        (GPT2, {"add_qkv_bias": True}),  # every linear layer has one
        (LLAMA, {"no_bias_gelu_fusion": True}),  # it has no GELU
        (LLAMA, {"rope_scaling_factor": 3.0}),  # without --use-rope-scaling
        (GPT2, {"attention_dropout": 0.5, "init_method_std": 1.0}),
    ],
)
def test_what_means_the_same_is_the_same_model(base, written):
    other = replace(base, model=replace(base.model, **written))
    assert problems(base, other) == problems(other, base) == []


@pytest.mark.parametrize(
    ("base", "written", "text"),
    [
        (GPT2, {"ffn_hidden_size": 64}, "--ffn-hidden-size is 64, but iter_0000001 has 128"),
        (GPT2, {"kv_channels": 16}, "--kv-channels is 16, but iter_0000001 has 8"),
        (GPT2, {"group_query_attention": True, "num_query_groups": 2}, 
         "--num-query-groups is 2, but iter_0000001 has 4"),
        (GPT2, {"window_size": "(7,0)"}, "--window-size is 7, but iter_0000001 has None"),
        (GPT2, {"no_bias_gelu_fusion": True}, "--no-bias-gelu-fusion is True, but iter_0000001 has False"),
        (GPT2, {"num_layers": 3}, "--num-layers is 3, but iter_0000001 has 4"),
        (LLAMA, {"rotary_base": 5}, "--rotary-base is 5, but iter_0000001 has 10000.0"),
        (LLAMA, {"rotary_percent": 0.5}, "--rotary-percent is 0.5, but iter_0000001 has 1.0"),
        (LLAMA, {"rotary_interleaved": True}, "--rotary-interleaved is True, but iter_0000001 has False"),
        (LLAMA, {"add_qkv_bias": True}, "--add-qkv-bias is True, but iter_0000001 has False"),
        (LLAMA, {"use_rope_scaling": True}, "--use-rope-scaling is True, but iter_0000001 has False"),
    ],
)  # fmt: skip
def test_what_means_something_else_is_refused_with_both_values(base, written, text):
    assert problems(base, replace(base, model=replace(base.model, **written))) == [text]


def test_a_factor_counts_where_it_scales_and_what_a_layer_overrides_may_count_too():
    scaled = replace(LLAMA, model=replace(LLAMA.model, use_rope_scaling=True))
    other = replace(scaled, model=replace(scaled.model, rope_scaling_factor=3.0))
    assert problems(scaled, other) == ["--rope-scaling-factor is 3.0, but iter_0000001 has 8.0"]
    layers = replace(GPT2.model, per_layer_overrides='{"0": {"hidden_dropout": 0.5}}')
    own, biased = (replace(GPT2, model=replace(layers, add_qkv_bias=bias)) for bias in (False, True))
    assert problems(own, biased) == ["--add-qkv-bias is True, but iter_0000001 has False"]


def test_the_width_of_an_mlp_counts_where_a_layer_has_one():
    said = ["--ffn-hidden-size is 64, but iter_0000001 has 128"]
    for freq, told in (("1", []), ("2", said)):
        base = replace(GPT2.model, num_experts=2, moe_ffn_hidden_size=8, moe_layer_freq=freq)
        narrow = replace(GPT2, model=replace(base, ffn_hidden_size=64))
        assert problems(replace(GPT2, model=base), narrow) == told


def test_settings_of_another_version_are_left_out():
    model = saved(GPT2)["model"] | {"a_setting_of_tomorrow": 1}
    assert resume_problems(model, None, GPT2, "it") == []


def test_a_curve_counts_unless_a_flag_says_whose_holds():
    other = replace(GPT2, optimizer=replace(GPT2.optimizer, lr=1e-3))
    (text,) = problems(GPT2, other)
    assert "(checkpoint / here, lengths in samples): lr 0.003 / 0.001. Add --override-opt_param-scheduler" in text
    for flag in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"):
        assert problems(GPT2, other.with_fields(**{flag: True})) == []
    assert resume_problems(saved(GPT2)["model"], None, other, "it") == [], "weights alone have no curve"


def test_a_changed_setting_is_told_as_it_is_typed():
    there = saved(GPT2, model={"hidden_dropout": 0.25})
    text = "--hidden-dropout is 0.1, and was 0.25"
    assert changed_settings(there, None, GPT2, None) == {"hidden_dropout": text}
    assert unnamed({"hidden_dropout": text}, GPT2, "/x/iter_0000001") == [
        f"this would not be the training of /x/iter_0000001 any more: {text}. Give its settings, or to go on with "
        "yours add --override-on-load hidden_dropout"
    ]
    for name in ("hidden_dropout", "hidden-dropout", "--hidden-dropout"):
        assert (
            unnamed({"hidden_dropout": text}, replace(GPT2, checkpoint=CheckpointConfig(override_on_load=(name,))), "")
            == []
        )


def test_what_is_named_already_is_in_the_remedy_too():
    named = replace(GPT2, checkpoint=CheckpointConfig(override_on_load=("seed",)))
    (text,) = unnamed({"seed": "", "split": ""}, named, "it")
    assert text.endswith("add --override-on-load seed split")
    assert unnamed({"data_path": "", "tokenizer_model": ""}, replace(
        GPT2, checkpoint=CheckpointConfig(override_on_load=("data_path", "tokenizer_model"))), "it") == []  # fmt: skip


def test_the_curve_of_the_ends_goes_with_the_curve():
    changed = {"decoupled_lr": "one", "decoupled_min_lr": "two"}
    assert len(unnamed(changed, GPT2, "it")) == 1
    free = replace(GPT2, optimizer=replace(GPT2.optimizer, override_opt_param_scheduler=True))
    assert unnamed(changed, free, "it") == []


@pytest.mark.parametrize(("tp", "pp", "cp", "batch"), [(1, 1, 1, 16), (2, 1, 1, 8), (2, 2, 1, 4), (1, 2, 2, 4)])
def test_a_batch_that_was_not_given_was_one_microbatch_on_every_replica(tp, pp, cp, batch):
    layout = {f"{axis}_parallel_size": n for axis, n in (("tensor_model", tp), ("pipeline_model", pp), ("context", cp))}
    there = saved(GPT2, batch={"global_batch_size": None}, parallel=layout) | {"world_size": 8}
    text = f"--global-batch-size is 8, and was {batch}"
    assert changed_settings(there, None, GPT2, None) == ({} if batch == 8 else {"global_batch_size": text})
    there["parallel"] = {}
    assert changed_settings(there, None, GPT2, None) == {"global_batch_size": "--global-batch-size is 8, and was 16"}


def test_a_schedule_of_batches_is_compared_by_its_steps():
    steps = replace(GPT2, batch=replace(GPT2.batch, step_batch_size_schedule="0:4 40:8", global_batch_size=None))
    there = saved(steps)
    assert changed_settings(there, None, steps, None) == {}
    there["batch"]["step_batch_size_schedule"] = "0:8"
    assert list(changed_settings(there, None, steps, None)) == ["step_batch_size_schedule"]
    ramp = replace(GPT2, batch=replace(GPT2.batch, rampup_batch_size=(2, 2, 8)))
    assert changed_settings(saved(ramp), None, ramp, None) == {}, "a list in JSON is the tuple that it was"


def test_one_layers_dropout_is_drawn_by_microbatches_too():
    layer = replace(
        GPT2.model, hidden_dropout=0.0, attention_dropout=0.0, per_layer_overrides='{"0": {"hidden_dropout": 0.5}}'
    )
    base = replace(GPT2, model=layer)
    assert list(changed_settings(saved(base, batch={"micro_batch_size": 4}), None, base, None)) == ["micro_batch_size"]


def test_what_has_not_trained_or_is_of_an_earlier_version_has_nothing_to_compare():
    """A converted model has no length of its own; what a field that is missing said, nobody knows."""
    other = {"seed": 99, "micro_batch_size": 4}
    converted = saved(GPT2, batch=other | {"seq_length": None})
    assert changed_settings(converted, {"data_path": "a"}, GPT2, {"data_path": "b"}) == {}
    earlier = saved(GPT2)
    del earlier["batch"]["seed"], earlier["batch"]["micro_batch_size"], earlier["data"]["split"]
    assert changed_settings(earlier, None, GPT2, None) == {}


def test_contents_are_compared_where_both_are_known():
    there = saved(GPT2)
    said = "--data-path is another file or has other contents than the run trained with"
    assert changed_settings(there, {"data_path": "a"}, GPT2, {"data_path": "b"}) == {"data_path": said}
    both = ({"data_path": path, TOKENS: tokens} for path, tokens in ("ax", "by"))
    assert changed_settings(there, next(both), GPT2, next(both)) == {"data_path": said}, "one reason is enough"
    for one, two in (({"data_path": "a"}, {}), ({}, {"data_path": "a"})):
        assert changed_settings(there, one, GPT2, two) == {"data_path": said}
    for one, two in (({"data_path": "a"}, None), (None, {"data_path": "a"}), ({"data_path": "a"}, {"data_path": "a"})):
        assert changed_settings(there, one, GPT2, two) == {}


@pytest.mark.parametrize("name", ["wsd", "wsd_style", "init_lr"])
def test_a_setting_of_the_curve_that_an_older_version_lacked_was_at_its_default(name):
    """Each new one was 'None / 2', and refused all older checkpoints (tests/golden told)."""
    older = json.loads(json.dumps(settings(GPT2)))
    del older[name]
    assert resume_problems(saved(GPT2)["model"], older, GPT2, "it") == []
    changed = {"wsd": {"lr_wsd_decay_iters": 3}, "wsd_style": {"lr_wsd_decay_style": "linear"}}
    changed = changed.get(name, {"lr_warmup_init": 1e-5})
    here = GPT2.with_fields(**changed)
    (line,) = resume_problems(saved(GPT2)["model"], older, here, "it")
    assert f"{name} " in line
