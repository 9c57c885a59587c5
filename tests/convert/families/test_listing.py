"""What is said of families: those that go, and of those that do not what is lacking and which is near."""

from __future__ import annotations

import pytest
from tiny import LLAMA

from megapipe.commands import convert
from megapipe.convert.huggingface.families import from_huggingface, to_huggingface
from megapipe.convert.huggingface.listing import _REFUSED, lacking, listing, nearest_by_keys
from megapipe.convert.huggingface.tables import FAMILIES
from megapipe.errors import CheckpointError, ConfigError


def test_the_list_has_every_family_with_what_of_it_goes(capsys):
    convert.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    for name, family in FAMILIES.items():
        assert any(line.split()[:1] == [name] and line.endswith(f"  {family.what}") for line in lines)
    assert "  olmo: LayerNorm without a weight (llama)" in lines
    assert max(map(len, lines)) <= 130


def test_no_flag_goes_with_the_list(tmp_path):
    with pytest.raises(ConfigError, match="--list shows the families and converts nothing"):
        convert.main(["--list", "--save", str(tmp_path / "new")])


def test_a_family_is_refused_or_goes_and_the_near_one_goes():
    refused = [name for names, _, _ in _REFUSED for name in names.split()]
    assert len(refused) == len(set(refused))
    assert not set(refused) & FAMILIES.keys()
    assert {nearest for _, nearest, _ in _REFUSED} <= FAMILIES.keys()
    assert sum(1 for _ in listing()) == len(FAMILIES) + len(_REFUSED) + 3


def test_a_refused_family_is_answered_with_what_is_lacking():
    assert lacking("olmo") == ("llama", "LayerNorm without a weight")
    with pytest.raises(
        CheckpointError, match=r"nothing here for LayerNorm without a weight.*The nearest family is llama"
    ):
        from_huggingface({"model_type": "olmo"})


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_family_with_the_keys_of_a_known_one_is_nearest_to_it(name):
    content = dict.fromkeys(FAMILIES[name].defaults, 1) | {"model_type": "mystery", "use_cache": True}
    near = nearest_by_keys(content)
    assert FAMILIES[near].defaults.keys() == FAMILIES[name].defaults.keys()
    assert lacking("mystery") is None


def test_an_export_names_the_nearest_family():
    with pytest.raises(CheckpointError) as caught:
        to_huggingface(LLAMA.__class__(**{**vars(LLAMA), "swiglu": False, "quick_geglu": True}), 64)
    assert caught.value.problems[0] == "no family of Hugging Face models is like this one; nearest is llama:"
    assert any("--quick-geglu is True" in line for line in caught.value.problems)
