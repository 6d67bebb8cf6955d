"""Align the records of each process and group with the lines of the communicators that serve the group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from commprof.align.alignment_streams import (
    Expectation,
    GroupKey,
    LineStream,
    RecordStream,
    RunProcess,
    Vocabulary,
)
from commprof.align.divergence import Divergence, first_difference, surroundings
from commprof.align.expected_lines import PLAIN_DIALECT, Expected
from commprof.align.match_rows import (
    EXTRA,
    LIKELY_EITHER,
    MATCHED,
    MISSING,
    SILENT,
    UNCLEAR,
    MatchRows,
    torn_lines,
)
from commprof.align.pairing import Pairing
from commprof.align.sequences.count_bounds import surplus
from commprof.align.sequences.edits import ALONE, AMBIGUOUS, Codes, Partners
from commprof.align.sequences.pairs import UNSEARCHED, find_partners

TOO_DIFFERENT: Final = "the records and the lines of this group differ too much to be matched"
Key = tuple[RunProcess, GroupKey]


class GroupAlignment:
    """Aligns every group of every process.

    The results are rows, outcomes by communicator, and first divergences.
    """

    def __init__(
        self,
        streams: Mapping[Key, RecordStream],
        lines: Sequence[LineStream],
        pairing: Pairing,
        vocabulary: Vocabulary,
        rows: MatchRows,
        ops: pa.Table,
    ) -> None:
        self._streams, self._lines, self._pairing = dict(streams), lines, pairing
        self._vocabulary, self._rows, self._ops = vocabulary, rows, ops
        self._torn = torn_lines(ops)
        self.outcomes: dict[int, Counter[str]] = {number: Counter() for number in range(len(lines))}
        self.divergences: list[Divergence] = []
        self.unclear = 0

    def run(self) -> None:
        """Add a row for every line of the log, and for every record one row for each line that it leaves."""
        members: dict[Key, list[int]] = {}
        for number, stream in sorted(
            self._pairing.streams.items(), key=lambda item: self._lines[item[0]].rows[0]
        ):
            key = stream.process, stream.group
            members.setdefault(key, []).append(number)
            if key not in self._streams:  # messages with a separate communicator are removed from their group
                group_key = stream.process, stream.group._replace(pair=None)
                self._streams[group_key] = self._streams[group_key].without(stream.records)
                self._streams[key] = stream
        undecided = self._leave_undecided()
        heard = {key[0] for key in members} | {key[0] for key in undecided}
        for key, stream in self._streams.items():
            if key in members:
                self._align(stream, members[key])
            elif key not in undecided:
                self._miss(stream, heard)
        for number, reason in sorted(self._pairing.reasons.items()):
            if number not in self._pairing.undecided:
                self._rows.add_lines(EXTRA, self._lines[number].rows, reason)
                self.outcomes[number]["extra"] += len(self._lines[number].rows)

    def _leave_undecided(self) -> set[Key]:
        """Mark all lines and records of groups that cannot be distinguished as ambiguous.

        Returns:
            The processes and groups of these records.
        """
        done: set[Key] = set()
        together: dict[frozenset[Key], list[int]] = {}
        expected: dict[Key, Codes] = {}
        for number, streams in sorted(self._pairing.undecided.items()):
            line, reason = self._lines[number], self._pairing.reasons[number]
            self._rows.add_lines(LIKELY_EITHER, line.rows, reason)
            self.outcomes[number]["ambiguous"] += len(line.rows)
            for stream in streams:
                key = stream.process, stream.group
                if key not in done:
                    done.add(key)
                    expectation = self._expect(stream, [line])
                    everything = np.arange(len(expectation.codes))
                    self._rows.add_expected(LIKELY_EITHER, expectation, everything, reason)
                    expected[key] = expectation.codes
            keys = frozenset((stream.process, stream.group) for stream in streams)
            together.setdefault(keys, []).append(number)
        for keys, numbers in together.items():
            records = np.concatenate([expected[key] for key in keys])
            lines = np.concatenate([self._lines[number].codes for number in numbers])
            self._bound(numbers[0], records, lines)
        return done

    def _bound(self, number: int, records: Codes, lines: Codes) -> tuple[int, int]:
        """Count the ambiguous records and lines that are at least missing and extra, for communicator ``number``."""
        missing, extra = surplus(records, lines), surplus(lines, records)
        outcome = self.outcomes[number]
        outcome["ambiguous_records"] += len(records)
        outcome["ambiguous_missing"] += missing
        outcome["ambiguous_extra"] += extra
        return missing, extra

    def _expect(self, stream: RecordStream, lines: Sequence[LineStream]) -> Expectation:
        source = max(lines, key=lambda line: len(line.rows), default=None)
        calls = np.unique(stream.calls).tolist()
        dialect = PLAIN_DIALECT if source is None else source.dialect(self._vocabulary, calls)
        expectation = stream.expect(self._vocabulary, dialect)
        self._rows.add_records(MISSING, expectation.unclear, UNCLEAR)
        self._rows.add_records(MATCHED, expectation.silent, SILENT)
        self.unclear += len(expectation.unclear)
        return expectation

    def _miss(self, stream: RecordStream, heard: set[RunProcess]) -> None:
        process = stream.process
        if process in heard:
            reason = (
                f"no communicator of the log fits group {stream.group.pg} (ranks {stream.group.group_ranks})"
            )
        else:
            reason = f"the log has no operation of rank {process.rank} (process {process.pid})"
        expectation = self._expect(stream, [])
        self._rows.add_expected(MISSING, expectation, np.arange(len(expectation.codes)), reason)

    def _align(self, stream: RecordStream, numbers: Sequence[int]) -> None:
        """Align one stream of records with its communicators.

        There is usually one communicator, and there are more if the communicator was created again.
        """
        lines = [self._lines[number] for number in numbers]
        expectation = self._expect(stream, lines)
        printed = np.concatenate([line.codes for line in lines])
        rows = np.concatenate([line.rows for line in lines])
        owners = np.repeat(np.arange(len(lines)), [len(line.rows) for line in lines])
        partners = find_partners(expectation.codes, printed)
        paired = np.flatnonzero(partners.first >= 0)
        self._rows.add_matched(expectation, paired, rows[partners.first[paired]])
        self._add_missing(stream, expectation, np.flatnonzero(partners.first == ALONE))
        extra = np.flatnonzero(partners.second == ALONE)
        fits = f"no record of group {stream.group.pg} (ranks {stream.group.group_ranks}) fits here"
        self._rows.add_lines(EXTRA, rows[extra], fits)
        of_line = np.array(numbers)[owners]
        self._add_ambiguous(
            expectation, partners, rows, printed, of_line if len(of_line) else np.array(numbers)
        )
        self._count(numbers, owners, partners, len(expectation.unclear))
        self._show(stream, lines[0], expectation, partners, rows)

    def _add_missing(self, stream: RecordStream, expectation: Expectation, places: Codes) -> None:
        columns = np.stack(
            [
                values[places]
                for values in (expectation.codes, expectation.line_numbers, expectation.line_counts)
            ]
        )
        kinds, of = np.unique(columns, axis=1, return_inverse=True)
        for number, (code, line_number, line_count) in enumerate(kinds.T.tolist()):
            line = self._vocabulary.lines[code]
            reason = self._missing(stream.process, line, line_number, line_count)
            self._rows.add_expected(MISSING, expectation, places[of.reshape(-1) == number], reason)

    def _missing(self, process: RunProcess, line: Expected, line_number: int, line_count: int) -> str:
        reason = "the log has no line for this record at this position"
        if line_count > 1:
            reason = f"line {line_number + 1} of {line_count} expected for this record ({line.op}) is not in the log"
        torn = self._torn.get((process.pid, line.op), [])
        if torn:
            reason += f"; it may be a truncated line of this process: {', '.join(torn[:3])}"
        return reason

    def _add_ambiguous(
        self, expectation: Expectation, partners: Partners, rows: Codes, printed: Codes, owners: Codes
    ) -> None:
        """Add rows for ambiguous records and lines.

        Args:
            owners: The communicator of each line.
        """
        for verdict in (UNSEARCHED, AMBIGUOUS):
            xs = np.flatnonzero(partners.first == verdict)
            ys = np.flatnonzero(partners.second == verdict)
            # Elements between the same two certain pairs have the same number of pairs before them.
            of_record = np.cumsum(partners.first >= 0)[xs]
            of_line = np.cumsum(partners.second >= 0)[ys]
            for place in np.union1d(of_record, of_line).tolist():
                here = xs[slice(*np.searchsorted(of_record, (place, place + 1)))]
                there = ys[slice(*np.searchsorted(of_line, (place, place + 1)))]
                at = min(int(np.searchsorted(np.cumsum(partners.second >= 0), place)), len(owners) - 1)
                missing, extra = self._bound(int(owners[at]), expectation.codes[here], printed[there])
                bounded = bounds_text(missing, extra)
                reason = f"{TOO_DIFFERENT}{bounded}"
                if verdict == AMBIGUOUS:
                    reason = f"{either(len(here), len(there))}{bounded}"
                self._rows.add_expected(LIKELY_EITHER, expectation, here, reason)
                self._rows.add_lines(LIKELY_EITHER, rows[there], reason)

    def _count(self, numbers: Sequence[int], owners: Codes, partners: Partners, unclear: int) -> None:
        """Count lines at their communicator, and missing lines at the communicator of the preceding pair."""
        for place, number in enumerate(numbers):
            own: Codes = partners.second[owners == place]
            outcome = self.outcomes[number]
            outcome["matched"] += int((own >= 0).sum())
            outcome["extra"] += int((own == ALONE).sum())
            outcome["ambiguous"] += int((own <= AMBIGUOUS).sum())
        before = np.maximum.accumulate(np.concatenate(([0], partners.first)))[1:]
        missed = owners[before[partners.first == ALONE]] if len(owners) else owners
        for owner, count in Counter(missed.tolist()).items():
            self.outcomes[numbers[owner]]["missing"] += count
        self.outcomes[numbers[0]]["missing"] += unclear

    def _show(
        self,
        stream: RecordStream,
        line: LineStream,
        expectation: Expectation,
        partners: Partners,
        rows: Codes,
    ) -> None:
        place = first_difference(partners)
        if place is None:
            return
        vocabulary, ops = self._vocabulary, self._ops

        def record_text(position: int) -> str:
            text = f"{_words(vocabulary.lines[expectation.codes[position]])}"
            if expectation.line_counts[position] > 1:
                text += f" ({expectation.line_numbers[position] + 1} of {expectation.line_counts[position]})"
            return f"{self._rows.name_of(int(expectation.records[position]))} {text}"

        def line_text(position: int) -> str:
            row = (
                ops.slice(int(rows[position]), 1)
                .select(["file", "line", "op", "message_bytes"])
                .to_pylist()[0]
            )
            return f"{row['file']}:{row['line']} {row['op']} {row['message_bytes']} B"

        self.divergences.append(
            Divergence(
                stream.process.rank,
                stream.group.pg,
                stream.group.pair or stream.group.group_ranks,
                line.comm,
                line.process.host,
                line.process.pid,
                place[0],
                surroundings(partners, place, record_text, line_text),
            )
        )


def bounds_text(missing: int, extra: int) -> str:
    """Return a clause with the lowest numbers of ambiguous records and lines that have no partner.

    The clause is empty if these numbers are 0.
    """
    clauses = []
    if missing:
        clauses.append(f"at least {missing:,} of these records {'have' if missing > 1 else 'has'} no line")
    if extra:
        clauses.append(f"at least {extra:,} of these lines {'have' if extra > 1 else 'has'} no record")
    return f"; {', '.join(clauses)}" if clauses else ""


def either(records: int, lines: int) -> str:
    """Return the sentence for ``records`` and ``lines`` that may match each other in several ways."""
    return (
        f"{records} expected and {lines} printed lines, between lines with a certain match, match each other in "
        "several ways: it is not known which of them were dropped or duplicated"
    )


def _words(line: Expected) -> str:
    return f"{line.op} {line.message_bytes} B"
