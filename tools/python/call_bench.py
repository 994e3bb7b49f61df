# SPDX-License-Identifier: Apache-2.0
"""Calls of deep_ep one at a time, as a model makes them, and in series, over EPX and with DeepEP itself.

    python tools/python/call_bench.py --device cuda --ranks 2,4,8 [--deepep FOLDER]
    python tools/python/call_bench.py                       (CPU tensors: 2 ranks, 8 tokens, hidden 128)

FOLDER has DeepEP's packages deep_ep and deep_ep_cpp. Each package runs in processes of its own, one after the other for
each number of ranks. One at a time: the ranks meet before each call, on an idle GPU. "host" ends when the call has
returned and the shapes of what it received and its list of counts were read, "done" when the GPU is idle. Series are
queued without a stop. No received rows are held beside those of the call. All in microseconds: the median over calls,
of the median rank and of the slowest one.
"""

import argparse
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))


class Meeting:
    """Where the ranks meet: words of shared memory, without a call of the operating system."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        self._file = open(path, "r+b")  # pylint: disable=consider-using-with
        self._words = memoryview(mmap.mmap(self._file.fileno(), 8 * ranks)).cast("q")
        self._rank, self._ranks, self._count = rank, ranks, 0

    def meet(self) -> None:
        """Returns when all ranks are here."""
        self._count += 1
        self._words[self._rank] = self._count
        while min(self._words[rank] for rank in range(self._ranks)) < self._count:
            time.sleep(0)


def read(result: Any) -> None:
    """What a caller reads at once: shapes, and the list of counts."""
    for part in result:
        if isinstance(part, list):
            sum(part)
        for one in part if type(part) is tuple else (part,):
            if hasattr(one, "shape"):
                tuple(one.shape)


def one_at_a_time(call: Callable[[int], Any], meeting: Meeting, idle: Callable[[], None],
                  count: int) -> Tuple[float, float]:
    """(host, done) of a call."""
    hosts, dones = [], []
    for i in range(count + 10):
        idle()
        meeting.meet()
        begin = time.perf_counter()
        result = call(i)
        read(result)
        host = time.perf_counter()
        idle()
        dones.append((time.perf_counter() - begin) * 1e6)
        hosts.append((host - begin) * 1e6)
        del result
    return sorted(hosts[10:])[count // 2], sorted(dones[10:])[count // 2]


def calls_of(layer: Any, args: argparse.Namespace, ranks: int) -> Dict[str, Callable[[int], Any]]:
    """The calls, by name. Each takes the number of the call."""
    from layer_bench import ROUTINGS

    buffer, worst = layer.buffer, args.tokens * ranks
    kept = []  # (rows, weights, handle): no received rows are held
    for i in range(ROUTINGS):
        recv, _idx, weights, _counts, handle, _event = layer.dispatch(i, layer.x)
        kept.append((recv.shape[0], weights, handle))
        del recv

    def fresh(x: Any, num_worst: int = 0) -> Callable[[int], Any]:
        return lambda i: layer.dispatch(i, x, num_worst_tokens=num_worst)

    def combine(i: int) -> Any:
        rows, weights, handle = kept[i % ROUTINGS]
        return buffer.combine(layer.rows[:rows], handle, topk_weights=weights)
    return {
        "layout": layer.layout,
        "fresh dispatch, BF16": fresh(layer.x),
        "fresh dispatch, FP8": fresh(layer.fp8),
        "the same, num_worst_tokens, BF16": fresh(layer.x, worst),
        "the same, num_worst_tokens, FP8": fresh(layer.fp8, worst),
        "by handle, BF16": lambda i: buffer.dispatch(layer.x, handle=kept[i % ROUTINGS][2]),
        "by handle, FP8": lambda i: buffer.dispatch(layer.fp8, handle=kept[i % ROUTINGS][2]),
        "combine with weights": combine,
    }


def worker(args: argparse.Namespace) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from deep_ep_bench import gathered
    from layer_bench import Layer, wall

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    idle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    layer, meeting = Layer(args, device), Meeting(args.meeting, rank, ranks)
    lines: List[Tuple[str, List[float], List[float]]] = []
    for name, call in calls_of(layer, args, ranks).items():
        host, done = one_at_a_time(call, meeting, idle, args.calls)
        lines.append((name, gathered(host), gathered(done)))
    for name, whole in (("series of layers, FP8", layer.whole(layer.fp8)),
                        ("series of layers, BF16", layer.whole(layer.x))):
        clock, host = wall(whole, device, args.layers)
        lines.append((name, gathered(host), gathered(clock)))
    for name, hosts, dones in lines if rank == 0 else []:
        middle = len(hosts) // 2
        print("| %s | %d | %s | %.0f / %.0f | %.0f / %.0f |" % (
            name, ranks, args.label, hosts[middle], dones[middle], hosts[-1], dones[-1]), flush=True)
    layer.buffer.destroy()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in python/tests/suite.py


def run(args: argparse.Namespace, ranks: int, label: str, folder: str) -> None:
    """All ranks of one package."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as words:
        words.truncate(8 * ranks)
        path = os.pathsep.join(filter(None, (folder, HERE, os.environ.get("PYTHONPATH", ""))))
        given = [item for name in ("device", "tokens", "hidden", "experts", "topk", "calls", "layers")
                 for item in ("--" + name, str(getattr(args, name)))]
        children = [subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--meeting", words.name, "--label", label, *given],
            env=dict(os.environ, PYTHONPATH=path, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                     LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
            for rank in range(ranks)]
        try:
            if any([child.wait(timeout=args.timeout) for child in children]):
                print("| a rank of %s failed | %d | %s | | |" % (label, ranks, label), flush=True)
        finally:
            for child in children:
                child.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--deepep", default="", help="folder of DeepEP's packages")
    parser.add_argument("--tokens", type=int, help="4096; 8 on the CPU")
    parser.add_argument("--hidden", type=int, help="7168; 128 on the CPU")
    parser.add_argument("--experts", type=int, help="256; 16 on the CPU")
    parser.add_argument("--topk", type=int, help="8; 4 on the CPU")
    parser.add_argument("--calls", type=int, default=40, help="of a kind, one at a time")
    parser.add_argument("--layers", type=int, default=12, help="in a series")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one package and number of ranks")
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    parser.add_argument("--label", default="EPX", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, on_cpu, on_gpu in (("tokens", 8, 4096), ("hidden", 128, 7168), ("experts", 16, 256), ("topk", 4, 8)):
        if getattr(args, name) is None:
            setattr(args, name, on_cpu if args.device == "cpu" else on_gpu)
    if args.meeting:
        worker(args)
        return
    print("| call | ranks | package | median rank: host / done, us | slowest rank |\n|---|---|---|---|---|", flush=True)
    for ranks in map(int, args.ranks.split(",")):
        run(args, ranks, "EPX", "")
        if args.deepep:
            run(args, ranks, "DeepEP", args.deepep)


if __name__ == "__main__":
    main()
