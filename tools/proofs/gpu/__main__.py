"""The roofline of a step: `python -m tools.proofs.gpu [--json]`, see roofline.py."""

from __future__ import annotations

import sys

from tools.proofs.gpu import fake_cuda


def main() -> None:
    fake_cuda.load()
    from tools.proofs.gpu import roofline  # it imports torch, which asks for its devices then

    roofline.main("--json" in sys.argv)


if __name__ == "__main__":
    main()
