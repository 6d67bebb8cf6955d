"""Runs the unit tests of DeepSpeed against zero_runtime under DeepSpeed's names.

The benchmark needs a checkout of DeepSpeed and downloads nothing. It copies only the ``tests`` folder and not the
package, so that ``import deepspeed`` always imports this runtime. ``--deepspeed-python`` runs the same tests with an
installed DeepSpeed for comparison. Ranks are processes on gloo. A test that hangs counts as failed.

The outcome of a test is passed, failed, refused or skipped. Refused means that zero_runtime raised an error that names
the feature that it does not have. Skipped means that the test skipped itself, for example because it needs a GPU. A
file that cannot be imported counts once for each test function in the file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from results import arguments, publish

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "zero": ("runtime/zero", "v1/zero"),
    "checkpoint": ("checkpoint",),
    "config": (
        "runtime/test_ds_config_dict.py",
        "runtime/test_ds_config_model.py",
        "runtime/test_ds_initialize.py",
    ),
    "schedules": ("runtime/test_lr_schedulers.py",),
    "pipeline": ("runtime/pipe", "pipe"),
    "comm": ("comm",),
    "experts": ("v1/moe/test_moe.py",),
    "precision": ("runtime/half_precision", "v1/half_precision", "runtime/test_autocast.py"),
    "engine": (
        "runtime/test_data.py",
        "runtime/test_multi_output_model.py",
        "runtime/test_multiple_models.py",
        "runtime/test_no_sync_ctxt.py",
        "runtime/test_runtime_utils.py",
        "runtime/activation_checkpointing",
        "runtime/utils",
        "utils",
    ),
}
OUTCOMES: Final = ("passed", "failed", "refused", "skipped")
# The texts of errors about features that zero_runtime leaves out on purpose (zero_runtime.errors, refused keys).
_REFUSAL: Final = re.compile(
    r"UnsupportedError|is not in this version of zero_runtime|zero_runtime.errors.ConfigError: .*removed from DeepSpeed"
)
_PLUGIN: Final = """
import json, multiprocessing, os
# Ranks start from a server that has imported all this already: a test then costs what it does, not what importing does.
multiprocessing.set_forkserver_preload(["torch", "deepspeed", "unit.common", "unit.simple_model"])
def _say(**row):
    with open(os.environ["SUITE_LOG"], "a") as file:
        file.write(json.dumps(row) + "\\n")
def pytest_runtest_logstart(nodeid, location):
    _say(started=nodeid)
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _say(test=report.nodeid, outcome=report.outcome, text=str(report.longrepr or "")[-20000:])
def pytest_collectreport(report):
    if report.outcome == "failed":
        _say(unread=report.nodeid, text=str(report.longrepr)[-20000:])
"""


class Result(NamedTuple):
    """The outcome of one test."""

    part: str
    test: str
    outcome: str
    reason: str


def test_files(folder: Path, part: str) -> Iterator[Path]:
    """Yield the test files of a part in order.

    If ``part`` is a file or a class in a file (``file::class``), only ``part`` itself is returned.
    """
    file = folder / part.partition("::")[0]
    if part not in PARTS and not file.is_file():
        raise SystemExit(f"there is no test file {file}")
    if part not in PARTS:
        yield folder / part
        return
    for name in PARTS[part]:
        path = folder / name
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path] * path.is_file()


def count_tests(path: Path) -> int:
    """Return the number of test functions in a file that could not be imported."""
    tree = ast.parse(path.read_text())
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in ast.walk(tree))


def environment(python: str, support: Path, log: Path, timeout: int, is_ours: bool) -> dict[str, str]:
    """Return the environment of a run. If ``is_ours``, every process that starts imports zero_runtime as deepspeed."""
    paths = [str(support)]
    if is_ours:
        paths += [str(support / "ours"), str(ROOT), str(ROOT / "runtime")]
    paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    return {
        **os.environ,
        # DeepSpeed compiles with the ninja of its environment.
        "PATH": os.pathsep.join((str(Path(python).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(paths),
        "SUITE_LOG": str(log),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "DS_UNITTEST_TIMEOUT": str(timeout),
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",  # DeepSpeed takes this value as the number of devices of a CPU.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_files(
    python: str, tests: Path, files: list[Path], support: Path, timeout: int, is_ours: bool
) -> list[dict[str, Any]]:
    """Run the tests of ``files`` and return the rows of their log.

    If a test hangs or terminates its process, pytest is started again without the tests that have already started.
    """
    log = support / "rows.log"
    log.unlink(missing_ok=True)
    passed_over: list[str] = []
    while True:
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "suite_log"]
        command += ["--rootdir", str(tests.parent), "--continue-on-collection-errors", *map(str, files)]
        command += [argument for test in passed_over for argument in ("--deselect", test)]
        process = subprocess.Popen(
            command,
            cwd=tests,
            env=environment(python, support, log, timeout, is_ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _wait(process, log, 2 * timeout)
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        finished = {row["test"] for row in rows if "test" in row}
        begun = [row["started"] for row in rows if "started" in row]
        cut = [test for test in begun if test not in finished]
        if not cut:
            return rows
        with log.open("a") as stream:
            for test in cut:
                stream.write(
                    json.dumps({"test": test, "outcome": "failed", "text": "hung, or ended its process"})
                    + "\n"
                )
        passed_over = sorted({*begun})


def _wait(process: subprocess.Popen[bytes], log: Path, patience: float) -> None:
    """Wait until ``process`` exits, then kill the processes that it left behind.

    If the log does not grow for ``patience`` seconds, ``process`` is killed as well.
    """
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = log.stat().st_size if log.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > patience:
            break
        time.sleep(0.2)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # also kills processes that hung ranks have left behind
    except ProcessLookupError:
        pass
    process.wait()


def results_of(part: str, tests: Path, rows: list[dict[str, Any]]) -> Iterator[Result]:
    """Yield one result for each test.

    If a test has several reports, the worst outcome counts. The names of files are relative to ``tests``.
    """
    for file, text in {row["unread"]: row["text"] for row in rows if "unread" in row}.items():
        for number in range(count_tests(tests / file)):
            yield Result(part, f"{file} (not imported) {number}", _outcome("failed", text), _reason(text))
    worst: dict[str, tuple[str, str]] = {}
    order = ("passed", "skipped", "refused", "failed")
    for row in rows:
        if "test" in row:
            outcome = _outcome(row["outcome"], row["text"])
            known = worst.get(row["test"])
            if known is None or order.index(outcome) > order.index(known[0]):
                worst[row["test"]] = outcome, _reason(row["text"])
    for test, (outcome, reason) in worst.items():
        yield Result(part, test, outcome, reason)


def _outcome(outcome: str, text: str) -> str:
    return "refused" if outcome == "failed" and _REFUSAL.search(text) else outcome


def _reason(text: str) -> str:
    """Return the line of a report that states the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(E\s+)?[\w.]*(Error|Exception|Skipped|Failed)\b", line)]
    return (errors or lines or [""])[-1][:300]


def measure(python: str, checkout: Path, parts: list[str], timeout: int, is_ours: bool) -> list[Result]:
    """Run the tests of all parts and return their results."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="deepspeed-suite-") as scratch:
        folder = Path(scratch)
        shutil.copytree(checkout / "tests", folder / "tests")
        (folder / "ours").mkdir()
        (folder / "ours" / "sitecustomize.py").write_text(
            "import zero_runtime\n\nzero_runtime.as_deepspeed()\n"
        )
        (folder / "suite_log.py").write_text(_PLUGIN)
        unit = folder / "tests" / "unit"
        for part in parts:
            rows = run_files(python, unit, list(test_files(unit, part)), folder, timeout, is_ours)
            found = list(results_of(part, folder / "tests", rows))
            results += found
            print(f"{part}: {dict(Counter(each.outcome for each in found))}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Run the tests, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed, with its tests folder")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="repeatable; default: all")
    parser.add_argument(
        "--file",
        action="append",
        help="a file below tests/unit, such as runtime/zero/test_zero_grad_clip.py, or a class in one (FILE::CLASS), in "
        "place of parts; repeatable",
    )
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one test; default: %(default)s")
    parser.add_argument(
        "--deepspeed-python", help="a Python that has DeepSpeed and pytest: run the same tests there too"
    )
    parser.add_argument(
        "--reasons", type=Path, help="write each test with its outcome and reason here, as JSON lines"
    )
    args = parser.parse_args()
    if not (args.checkout / "tests" / "unit").is_dir():
        raise SystemExit(f"{args.checkout} has no tests/unit: give the folder of a checkout of DeepSpeed")
    parts = [*(args.part or []), *(args.file or [])] or list(PARTS)
    ours = measure(sys.executable, args.checkout, parts, args.timeout, True)
    theirs = (
        measure(args.deepspeed_python, args.checkout, parts, args.timeout, False)
        if args.deepspeed_python
        else []
    )
    _keep_reasons(args, ours, theirs)
    passing = {each.test for each in theirs if each.outcome == "passed"}
    rows, figures = [], {}
    for part in [*parts, "all"]:
        mine = [each for each in ours if part in (each.part, "all")]
        counts = Counter(each.outcome for each in mine)
        both = [each for each in mine if each.test in passing]
        passed_too = sum(each.outcome == "passed" for each in both)
        cells = [str(counts[outcome]) for outcome in OUTCOMES]
        rows.append([part, *cells, f"{passed_too} of {len(both)}" if theirs else "-"])
        figures[part] = dict(counts)
    header = ["part", *OUTCOMES, "of those that DeepSpeed passes"]
    publish(args, "DeepSpeed's own unit tests, run against zero_runtime", header, rows, figures)


def _keep_reasons(args: argparse.Namespace, ours: list[Result], theirs: list[Result]) -> None:
    if args.reasons is not None:
        with args.reasons.open("w") as stream:
            for name, results in (("zero_runtime", ours), ("deepspeed", theirs)):
                for each in results:
                    stream.write(json.dumps({"of": name, **each._asdict()}) + "\n")


if __name__ == "__main__":
    main()
