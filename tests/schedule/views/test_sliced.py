"""What `show` says of slices."""

from megapipe.commands.main import command


def test_lengths_that_are_given_in_any_unit_are_shown_as_shares(capsys):
    words = ["show", "1f1b", "--pp", "2", "--microbatches", "4", "--slices", "2", "--cuts", "3,2"]
    command("schedules")(words)
    assert "slices, as given: 60.0% 40.0% of the sequence" in capsys.readouterr().out.splitlines()
