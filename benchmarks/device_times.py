"""Compares the times that commprof measures with events on a GPU to the times of CUPTI in the same run.

NCCL: one rank per GPU. With a single GPU, one rank runs alone first. It copies instead of communicating, and the
copies are compared. Then two ranks share the GPU. Each rank sets a different NCCL_HOSTID, so that the two ranks
communicate over loopback sockets. torch.profiler (CUPTI) provides the kernel times, one for each record, in issue
order.

The exposed_ns of a synchronous call is compared with the duration of the NCCL kernel. The exposed_ns of an asynchronous
call is compared with the time from the end of the concurrent compute until the end of the NCCL kernel. device_begin_ns
is compared with the begin of the kernel on the clock of the host.

gloo: several ranks on one GPU. The program waits for the device before and after each call, and measures the call with
its own clock for comparison.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from results import arguments, publish, spread

LATE_MS = 3.0
BESIDE_MS = (0.2, 4.0)
CASES = (
    "synchronous",
    f"synchronous, rank 0 {LATE_MS} ms late",
    *(f"beside {ms} ms of work" for ms in BESIDE_MS),
)
GLOO_RANKS = 2


def cycles_per_ms(torch: Any) -> float:
    """Return the number of cycles of the spin kernel that take 1 ms on this device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    torch.cuda.synchronize()
    return 20_000_000 / float(begin.elapsed_time(end))


def issue(torch: Any, rank: int, world: int, case: int, tensors: Sequence[Any], per_ms: float) -> None:
    """Issue the call of a case.

    A group of one rank issues an all_gather, because an all_reduce of a single rank needs no kernel.
    """
    import torch.distributed as dist

    def call(**how: Any) -> Any:
        if world == 1:
            return dist.all_gather_into_tensor(*tensors, **how)
        return dist.all_reduce(tensors[0], **how)

    if case < 2:
        if case == 1 and rank == 0:
            torch.cuda._sleep(int(LATE_MS * per_ms))
        call()
        return
    handle = call(async_op=True)
    torch.cuda._sleep(int(BESIDE_MS[case - 2] * per_ms))
    handle.wait()


def measure(rank: int, world: int, backend: str, folder: str, rounds: int, mib: int, results: Any) -> None:
    """Run one rank: issue the calls while commprof records them, and send the times measured by other means."""
    try:
        results.put((rank, _measure(rank, world, backend, folder, rounds, mib)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def _measure(rank: int, world: int, backend: str, folder: str, rounds: int, mib: int) -> list[Any]:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    import torch
    import torch.distributed as dist

    import commprof
    from commprof import hooks

    shared = backend == "gloo" or world > torch.cuda.device_count()
    if shared:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(0 if shared else rank)
    store = dist.FileStore(f"{folder}/store-{backend}-{world}", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    tensor = torch.ones(mib * 2**18, device="cuda")
    tensors = (tensor, tensor[: len(tensor) // world].clone())
    per_ms = cycles_per_ms(torch)
    commprof.attach(f"{folder}/{backend}-{world}", quiet=True)

    def block(number: int) -> list[int]:
        taken = []
        for case in range(len(CASES)):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            with hooks.tag("metric", bucket=number * len(CASES) + case):
                issue(torch, rank, world, case, tensors, per_ms)
            torch.cuda.synchronize()
            taken.append(time.perf_counter_ns() - begin)
        hooks.step(number + 1)
        return taken

    hooks.step(0)
    block(0)
    if backend == "nccl":
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for number in range(1, rounds + 1):
                block(number)
        measured: list[Any] = kernels(profile)
    else:
        measured = [block(number) for number in range(1, rounds + 1)]
    commprof.detach()
    dist.destroy_process_group()
    return measured


def kernels(profile: Any) -> list[tuple[str, int, int]]:
    """Return the name, begin and end of each kernel and copy that CUPTI recorded, in order of their begin.

    The times are in ns on the clock of the host.
    """
    found = []
    offset = time.time_ns() - time.perf_counter_ns()
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if str(event.device_type()).endswith("CUDA") and any(
            part in name for part in ("ncclDevKernel", "ncclKernel", "spin_kernel", "Memcpy DtoD")
        ):
            begin = event.start_ns() - offset
            found.append((name, begin, begin + event.duration_ns()))
    return sorted(found, key=lambda kernel: kernel[1])


def records(folder: str, backend: str, world: int, rank: int) -> list[dict[str, Any]]:
    """Return the records of the calls of one rank, except those of the first round."""
    from commprof.trace.reader import open_run

    rows = open_run(Path(folder, f"{backend}-{world}")).table("collectives").to_pylist()
    mine = [row for row in rows if row["rank"] == rank and row["purpose"] == "metric"]
    return sorted((row for row in mine if row["bucket"] >= len(CASES)), key=lambda row: row["bucket"])


def beside_cupti(
    rows: Sequence[Any], seen: Sequence[Any], rank: int, world: int
) -> dict[str, dict[str, list[float]]]:
    """Return the times of each case, in us.

    Returns:
        ``recorded``: The exposed times in the records.
        ``cupti``: The same times according to CUPTI.
        ``placed``: The recorded begins minus the begins of the kernels.

    Raises:
        ValueError: CUPTI did not record exactly one kernel for each call.
    """
    wanted = "Memcpy" if world == 1 else "nccl"
    transfers = [kernel for kernel in seen if wanted in kernel[0]]
    work = iter([kernel for kernel in seen if "spin" in kernel[0]])
    if len(transfers) != len(rows):
        raise ValueError(
            f"CUPTI saw {len(transfers)} kernels of {len(rows)} calls: they cannot be told apart"
        )
    found: dict[str, dict[str, list[float]]] = {}
    for row, (_, begin, end) in zip(rows, transfers, strict=True):
        case = row["bucket"] % len(CASES)
        _, _, work_end = next(work) if case > 1 or (case == 1 and rank == 0) else ("", 0, 0)
        truth = end - begin if case < 2 else max(0, end - work_end)
        into = found.setdefault(CASES[case], {"recorded": [], "cupti": [], "placed": []})
        if row["exposed_ns"] is None:
            continue
        into["recorded"].append(row["exposed_ns"] / 1000)
        into["cupti"].append(truth / 1000)
        if case == 0:
            into["placed"].append((row["device_begin_ns"] - begin) / 1000)
    return found


def run_ranks(world: int, backend: str, folder: str, rounds: int, mib: int) -> dict[int, list[Any]]:
    """Start ``world`` ranks and return the measurements by rank.

    Raises:
        RuntimeError: A rank failed.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=measure, args=(rank, world, backend, folder, rounds, mib, results))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        gathered = dict(results.get(timeout=600) for _ in ranks)
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
    failed = [text for text in gathered.values() if isinstance(text, str)]
    if failed:
        raise RuntimeError(failed[0])
    return gathered


def nccl(folder: str, world: int, args: Any, rows: list[list[str]], figures: dict[str, Any]) -> None:
    """Compare the records of each rank with the times of CUPTI."""
    for rank, seen in run_ranks(world, "nccl", folder, args.rounds, args.mib).items():
        name = f"nccl rank {rank} of {world}"
        for case, found in beside_cupti(records(folder, "nccl", world, rank), seen, rank, world).items():
            add(name, case, "cupti", found["recorded"], found["cupti"], rows, figures)
            if found["placed"]:
                figures[f"{name}, placed"] = spread(found["placed"])
                rows.append([name, "begin, after CUPTI's", "", "", spread(found["placed"]).text(1)])


def gloo(folder: str, world: int, args: Any, rows: list[list[str]], figures: dict[str, Any]) -> None:
    """Compare the records of each rank with the times that the program measured."""
    for rank, blocks in run_ranks(world, "gloo", folder, args.rounds, args.mib).items():
        mine = records(folder, "gloo", world, rank)
        for case in range(2):
            recorded = [row["exposed_ns"] for row in mine if row["bucket"] % len(CASES) == case]
            pairs = [
                (exposed / 1000, block[case] / 1000)
                for exposed, block in zip(recorded, blocks, strict=True)
                if exposed is not None
            ]
            add(
                f"gloo rank {rank} of {world}",
                CASES[case],
                "own",
                *map(list, zip(*pairs, strict=True)),
                rows,
                figures,
            )


def add(
    name: str,
    case: str,
    other: str,
    recorded: Sequence[float],
    truth: Sequence[float],
    rows: list[list[str]],
    figures: dict[str, Any],
) -> None:
    """Append a row to the table: the recorded times, the times for comparison, and the differences, in us."""
    if not recorded:
        raise ValueError(f"{name}, {case}: no record has a time")
    difference = [a - b for a, b in zip(recorded, truth, strict=True)]
    three = {"recorded": spread(recorded), other: spread(truth), "difference": spread(difference)}
    rows.append([name, case, *(one.text(1) for one in three.values())])
    figures[f"{name}, {case}"] = three


def main() -> int:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--mib", type=int, default=64, help="size of the tensors")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print(
            "device_times: no GPU is at hand (torch.cuda.is_available() is False), so nothing was measured."
        )
        return 0
    rows: list[list[str]] = []
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "mib": args.mib,
    }
    with tempfile.TemporaryDirectory() as folder:
        gpus = torch.cuda.device_count()
        parts = [(nccl, gpus), *([(nccl, 2)] if gpus == 1 else []), (gloo, GLOO_RANKS)]
        for part, world in parts:
            try:
                part(folder, world, args, rows, figures)
            except (RuntimeError, ValueError) as error:
                print(f"{part.__name__}: not measured: {error}", file=sys.stderr)
    publish(
        args,
        "Exposed time by events, us: median (smallest to largest)",
        ["ranks", "call", "recorded", "CUPTI, or the program's clock", "difference"],
        rows,
        figures,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
