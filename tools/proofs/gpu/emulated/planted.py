"""Defects that only a GPU would feel, planted one at a time: do the emulated devices find them?

    python -m tools.proofs.gpu.emulated.planted [--only NAME,NAME] [--by TRAINING,TRAINING]

Each is one changed place of the package, in a copy of the repository. The trainings of features.py
run there, those of the suite first, until one of them notices. Ends with the number of those that
are not found, and of those that the suite finds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo
import torch.distributed.tensor


class Planted(NamedTuple):
    """A defect. path: in the package; before, after: text that stands there once, and instead."""

    path: str
    before: str
    after: str


_DEVICE = "distributed/device.py"
_AXIS = "distributed/axis.py"
_HOST = "pipeline_parallel/families/offload/host.py"
_ACTIVATIONS = "pipeline_parallel/families/offload/activations.py"
_SLOT = "pipeline_parallel/graphs/slot.py"
_MESSENGER = "pipeline_parallel/messages/messenger.py"

DEFECTS = {
    "a copy does not wait for the kernels before it": Planted(
        _DEVICE,
        "        self._stream.wait_stream(torch.cuda.current_stream(self.device))\n",
        "",
    ),
    "the end of a copy is recorded before it": Planted(
        _DEVICE, "            return began, _event()\n", "            return began, began\n"
    ),
    "the end of a copy is recorded on the wrong stream": Planted(
        _DEVICE,
        "            return began, _event()\n",
        "        return began, _event()\n",
    ),
    "kernels wait for the begin of a copy": Planted(
        _DEVICE, "wait_event(begun[1])", "wait_event(begun[0])"
    ),
    "kernels do not wait for a copy": Planted(
        _DEVICE,
        "            torch.cuda.current_stream(self.device).wait_event(begun[1])\n",
        "            pass\n",
    ),
    "the copy waits where kernels should": Planted(
        _DEVICE,
        "torch.cuda.current_stream(self.device).wait_event(begun[1])",
        "self._stream.wait_event(begun[1])",
    ),
    "the allocator does not hear of a copy": Planted(
        _DEVICE, "                on_gpu.record_stream(self._stream)\n", ""
    ),
    "a copy does not wait for other copies": Planted(
        _DEVICE, "            self._stream.wait_event(ended)\n", "            pass\n"
    ),
    "copies run on the stream of the kernels' events": Planted(
        _DEVICE,
        "                to.copy_(source, non_blocking=True)\n",
        "                with torch.cuda.stream(torch.cuda.Stream(self.device)):\n"
        "                    to.copy_(source, non_blocking=True)\n",
    ),
    "a buffer of the host is lent before it is read": Planted(
        _ACTIVATIONS, "host.give(slot.buffer._replace(read=begun))", "host.give(slot.buffer)"
    ),
    "one buffer of the host is lent twice": Planted(
        _HOST, "        buffer = buffers.pop()\n", "        buffer = buffers[-1]\n"
    ),
    "loads do not wait for the copies out": Planted(
        _ACTIVATIONS, "host.back.begin(pairs, [kept.begun])", "host.back.begin(pairs, [])"
    ),
    "nobody waits for a load": Planted(
        _ACTIVATIONS,
        "return Copy(host.back, begun, needed=True)",
        "return Copy(host.back, begun, needed=False)",
    ),
    "a second thread begins on device 0": Planted(
        _DEVICE,
        "        torch.cuda.set_device(device)\n        with torch.cuda.stream(stream):\n"
        "            yield\n",
        "        with torch.cuda.stream(stream):\n            yield\n",
    ),
    "a second thread has a stream of its own": Planted(
        _DEVICE,
        "    stream = torch.cuda.current_stream(device)\n\n    @contextmanager",
        "    stream = torch.cuda.Stream(device)\n\n    @contextmanager",
    ),
    "of several handles the first alone is waited for": Planted(
        _AXIS, "            for work in works:\n", "            for work in works[1:]:\n"
    ),
    "a ring is not one batch": Planted(
        _AXIS,
        "            return Pending(out, dist.batch_isend_irecv(calls))\n",
        "            works = [dist.batch_isend_irecv([call])[0] for call in calls]\n"
        "            return Pending(out, works)\n",
    ),
    "a tensor of the host in a collective": Planted(
        _AXIS, "torch.zeros(1, device=self.device)", "torch.zeros(1)"
    ),
    "another size on one rank": Planted(
        _AXIS,
        "        op_of_torch = getattr(dist.ReduceOp, op.upper())\n",
        "        op_of_torch = getattr(dist.ReduceOp, op.upper())\n"
        "        x = x.view(-1)[self.rank if x.numel() > 9 else 0 :]\n",
    ),
    "another type on one rank": Planted(
        _AXIS,
        "        out = torch.empty_like(x) if into is None else into\n"
        "        previous",
        "        x = x.float() if self.rank else x\n"
        "        out = torch.empty_like(x) if into is None else into\n"
        "        previous",
    ),
    "a message that has not come is read": Planted(
        "pipeline_parallel/messages/transport.py",
        "        self._work.wait()\n        if self._then",
        "        if self._then",
    ),
    "messages go over one communicator": Planted(
        "pipeline_parallel/messages/transport.py",
        "        return self.pp.links[number] if number < len(self.pp.links) else None\n",
        "        return None\n",
    ),
    "what is sent is written again": Planted(
        _SLOT, "slot.grad_x.clone()", "slot.grad_x.detach()"
    ),
    "graphs read an old input": Planted(
        _SLOT,
        "                    own.copy_(given, non_blocking=True)\n",
        "                    pass\n",
    ),
    "graphs keep the pointer of a gradient": Planted(
        _SLOT, "        slot.grad.copy_(grad)\n", "        slot.grad = grad\n"
    ),
    "a graph's output is read after its slot has served another": Planted(
        _SLOT, "slot.output.clone() if lasts else slot.output.detach()", "slot.output.detach()"
    ),
    "a capture does not wait for what is there": Planted(
        _DEVICE, "        stream.wait_stream(current)\n", ""
    ),
    "nobody waits for a capture": Planted(
        _DEVICE, "        current.wait_stream(stream)\n", ""
    ),
    "an update does not wait for sums": Planted(
        "optim/reduction.py",
        "        finish_all = buffers.start_reduce(self.dtype)\n",
        "        buffers.start_reduce(self.dtype)\n        finish_all = int\n",
    ),
    "weights are read before they are gathered": Planted(
        "optim/sharded/gathers.py",
        "                self._gathering.pop(under_way)()\n",
        "                self._gathering.pop(under_way)\n",
    ),
    "shards go before their sum is over": Planted(
        "optim/sharded/buffers.py",
        "            self._pending = self.shares.start_reduce_scatter(full, into=into)\n",
        "            self._pending = self.shares.start_reduce_scatter(full, into=into)\n"
        "            self._grads.release()\n",
    ),
    "gradients are summed before the last layer": Planted(
        "optim/reduction.py",
        "            if is_next and layer <= first and layers == count:\n",
        "            if is_next and layers == count:\n",
    ),
    "rows of experts are read before they come": Planted(
        "models/moe/experts.py",
        "        rows = dispatcher.dispatch(x).wait()\n",
        "        rows = dispatcher.dispatch(x).tensor\n",
    ),
    "a page-locked batch is written again": Planted(
        "training/steps/batches.py",
        "            tokens = here.pop(\"tokens\")\n",
        "            tokens = here.pop(\"tokens\")\n"
        "            named[\"tokens\"].zero_()\n",
    ),
    "the host reads what is not there": Planted(
        "distributed/late.py",
        "    values = iter(torch.cat(parts).tolist())\n",
        "    values = iter(torch.cat(parts).to(\"cpu\", non_blocking=True).tolist())\n",
    ),
    "a tensor of the host in a kernel": Planted(
        "training/steps/totals.py",
        "on_device.add_(on_host.to(device, non_blocking=True))",
        "on_device.add_(on_host)",
    ),
    "a memory that has come is not filled": Planted(
        "optim/sharded/buffers.py",
        "            self._grads.allocate()\n            self.grads.zero_()\n",
        "            self._grads.allocate()\n",
    ),
}


def _search(
    defect: Planted, copy: Path, timeout_s: float, trainings: Sequence[str]
) -> dict[str, str]:
    """Plant a defect in a copy. trainings: those that run there; () for all.

    Returns: the first training that notices, and what it says.
    """
    from tools.proofs.mutants.copy import copy_repository
    from tools.proofs.mutants.draw import ROOT

    copy.mkdir(parents=True)
    copy_repository(copy)
    path = copy / "megapipe" / defect.path
    text = path.read_text()
    count = text.count(defect.before)
    assert count == 1, f"{defect.path} has {defect.before!r} {count} times"
    path.write_text(text.replace(defect.before, defect.after))
    # This process has imported nothing of the package, and of the tools what does not need it.
    own = sys.modules["tools.proofs.gpu.fake_cuda"]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "megapipe")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    os.chdir(copy)
    import tools.proofs.gpu

    tools.proofs.gpu.fake_cuda = own
    sys.modules["tools.proofs.gpu.fake_cuda"] = own
    from tools.proofs.gpu.emulated.features import FEATURES, SUITE, run

    torch.set_num_threads(1)
    # Those of the suite first: where one of them notices, the others need not run.
    names = [*SUITE, *(name for name in FEATURES if name not in SUITE)]
    for name in trainings or names:
        if said := run(name, timeout_s=timeout_s):
            lines = [x for x in said[0].splitlines() if x and not x.startswith("on rank")]
            error = next((x for x in reversed(lines) if x[:1] not in " " and ": " in x), lines[-1])
            text = error if lines[0].startswith("Traceback") else said[0]
            return {"by": name, "suite": str(name in SUITE), "said": text[:160]}
    return {}


def _listed(argv: Sequence[str], flag: str) -> list[str]:
    return argv[argv.index(flag) + 1].split(",") if flag in argv else []


def main(argv: Sequence[str]) -> int:
    """The status to end with: whether a defect was not found."""
    names, trainings = _listed(argv, "--only") or [*DEFECTS], _listed(argv, "--by")
    missed, by_suite = list[str](), 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for n, name in enumerate(names):
            begun, answer = time.monotonic(), Path(folder) / f"{n}.json"
            child = os.fork()
            if not child:
                try:
                    found = _search(DEFECTS[name], Path(folder) / str(n), 60.0, trainings)
                    answer.write_text(json.dumps(found))
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(0)
            os.waitpid(child, 0)
            found = json.loads(answer.read_text()) if answer.exists() else {}
            by_suite += found.get("suite") == "True"
            missed += [] if found else [name]
            text = "{said} ({by})".format(**found) if found else "NOT FOUND"
            print(f"{name}: {text} [{time.monotonic() - begun:.0f} s]", flush=True)
    print(f"{len(names)} defects, {len(missed)} not found, {by_suite} found by the suite")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
