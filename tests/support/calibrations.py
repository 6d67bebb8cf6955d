"""An invented calibration with a latency of 40 us and a bandwidth of 1 byte per ns for each operation."""

from __future__ import annotations

from commprof.calibration.results import Calibration, Timing

OPS = ("all_reduce", "reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def made_calibration() -> Calibration:
    """Return a calibration of two ranks on one host."""
    return Calibration(
        created="2026-11-20T12:00:00+00:00",
        torch="2.13.0",
        backend="gloo",
        backend_version=None,
        device="cpu",
        dtype="torch.float32",
        world_size=2,
        hosts=("one",),
        machine={"system": "Linux", "machine": "x86_64", "cpus": 2, "accelerator": None},
        timings={
            op: tuple(
                Timing(size, time, time, time, 20)
                for size, time in ((2**power, 40_000 + 2**power) for power in range(10, 31, 4))
            )
            for op in OPS
        },
    )
