"""Flags of precision, sequence parallelism and leaving a run: the sentences a user reads, and what the flags cause."""

from __future__ import annotations

import programs


def test_deterministic_mode_refuses_a_kernel_that_does_not_repeat(tmp_path):
    (tmp_path / "main.py").write_text(
        "import torch; from megapipe.distributed.device import be_deterministic; be_deterministic();"
        "torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))"
    )
    done = programs.run([tmp_path / "main.py"])
    assert "does not have a deterministic implementation" in done.stderr
