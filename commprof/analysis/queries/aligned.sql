-- Records beside NCCL lines, with what is known of either.
--
-- Input:  chosen (number of a row of matches, rank, pg, position), matches (with file_row_number), nccl_ops, collectives
-- Output: one row for each of chosen, in their order. Interleaved messages share one line: of them the largest values stand for all.
with shown as (
    select
        c.rank as of_rank, c.pg as of_pg, c.position, m.state, m.op, m.rank, m.attempt, m.record_pid, m.seq, m.part, m.parts,
        m.record_bytes, m.line_bytes, m.comm, m.file, m.line, m.reason
    from chosen c
    join matches m on m.file_row_number = c.number
    where m.file_row_number between {first} and {last}
),
printed as (
    select
        o.file,
        o.line,
        max(o.count) as elements,
        max(o.dtype) as dtype,
        max(o.opcount) as opcount
    from nccl_ops o
    join (select distinct file, line from shown where line is not null) s on s.file = o.file and s.line = o.line
    group by o.file, o.line
)
select
    s.of_rank as rank,
    s.of_pg as pg,
    s.position,
    s.state,
    s.op,
    s.attempt,
    s.record_pid,
    s.seq,
    s.part,
    s.parts,
    c.step,
    c.purpose,
    c.dtype as record_dtype,
    s.record_bytes,
    s.line_bytes,
    o.dtype as line_dtype,
    o.elements,
    o.opcount,
    s.comm,
    s.file,
    s.line,
    s.reason
from shown s
left join collectives c
    on c.rank = s.rank and c.attempt = s.attempt and c.pid = s.record_pid and c.seq = s.seq
left join printed o on o.file = s.file and o.line = s.line
order by s.of_rank nulls last, coalesce(s.of_pg, ''), s.position
