"""Measures exports of a long run, the check of an export, and the ledger: s per million records and peak memory.

The run is the run of ``finalise.py``. Each measurement runs in a separate process. Target: 1.5 GiB for 1e7 records.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))

from finalise import write_rank
from results import arguments, publish

from commprof.trace.finaliser import finalise

FORMATS: Final = ("csv", "parquet", "duckdb", "perfetto", "chakra", "html")
OTHERS: Final = ("check csv", "verify", "stragglers", "arrivals", "arrivals, in parts")
MEMORY_TARGET_MIB: Final = 1536


def measure(what: str, run: str, out: str) -> dict[str, float]:
    """Run one measurement in this process; return seconds, CPU seconds, peak memory in MiB and bytes written."""
    from commprof.analysis import api
    from commprof.export.chakra import export_chakra
    from commprof.export.csv import check_csv, export_csv
    from commprof.export.database import export_database
    from commprof.export.html import export_html
    from commprof.export.parquet import export_parquet
    from commprof.export.perfetto import export_perfetto

    actions = {
        "csv": lambda: export_csv(run, out),
        "parquet": lambda: export_parquet(run, out),
        "duckdb": lambda: export_database(run, out),
        "perfetto": lambda: export_perfetto(run, out),
        "chakra": lambda: export_chakra(run, out),
        "html": lambda: export_html(run, out),
        "check csv": lambda: check_csv(out, run),
        "verify": lambda: api.verify(run),
        "stragglers": lambda: api.stragglers(run),
        "arrivals": lambda: api.arrivals(run),
        "arrivals, in parts": lambda: sum(map(len, api.arrivals_parts(run))),
    }
    begin, cpu = time.perf_counter(), time.process_time()
    problems = actions[what]()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    if what == "check csv" and problems:
        raise SystemExit(f"the export does not agree with its run: {problems}")
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    written = sum(file.stat().st_size for file in Path(out).glob("*") if file.is_file())
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak / 1024, "bytes": written}


def _measured(what: str, run: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", what, str(run), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Write the run, export it, print the table and write it."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000_000, help="over all ranks")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=(*FORMATS, *OTHERS), help="leave out the others")
    parser.add_argument("--run", type=Path, help="an existing run of finalise.py, in the place of a new one")
    parser.add_argument(
        "--directory", type=Path, help="where to write; a Chrome trace has 700 bytes a record"
    )
    parser.add_argument(
        "--measure", nargs=3, metavar=("WHAT", "RUN", "OUT"), help="used by the benchmark itself"
    )
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    chosen = args.only or [*FORMATS, *OTHERS]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        run = args.run or Path(folder) / "run"
        if args.run is None:
            run.mkdir()
            for rank in range(args.ranks):
                write_rank(run, rank, args.ranks, args.records // args.ranks)
            finalise(run)
        records = sum(int(entry["records"]) for entry in json.loads((run / "run.json").read_text())["ranks"])
        found = {}
        if "csv" in chosen or "check csv" in chosen:
            found["csv"] = _measured("csv", run, Path(folder) / "csv")
        if "check csv" in chosen:
            found["check csv"] = _measured("check csv", run, Path(folder) / "csv")
        shutil.rmtree(Path(folder) / "csv", ignore_errors=True)
        for what in chosen:
            if what not in found:
                out = Path(folder) / "out"
                found[what] = _measured(what, run, out)
                shutil.rmtree(out, ignore_errors=True)
    rows = [
        [
            what,
            f"{one['seconds'] / records * 1e6:.2f}",
            f"{one['cpu_seconds'] / records * 1e6:.2f}",
            f"{one['peak_mib']:.0f}",
            f"{one['bytes'] / records:.0f}" if what in FORMATS else "-",
            f"{MEMORY_TARGET_MIB}",
        ]
        for what, one in found.items()
    ]
    header = [
        "what",
        "wall, s per million",
        "CPU, s per million",
        "peak RSS, MiB",
        "bytes a record",
        "target, MiB",
    ]
    title = f"Exports of {records:,} records, and what goes through every record"
    publish(args, title, header, rows, {"records": records, "exports": found})


if __name__ == "__main__":
    main()
