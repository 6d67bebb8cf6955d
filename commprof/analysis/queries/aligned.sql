-- Records beside NCCL lines, with what is known of either.
--
-- Input:  matches, comm_matches, nccl_ops, collectives
-- Output: the rows of matches. A line without a record has the rank of its process and the group of its communicator. Glued
--         messages share one line: of them the largest values stand for all.
with serving as (
    select host, pid, comm, comm_epoch, max(rank) as rank, max(pg) as pg
    from comm_matches
    group by host, pid, comm, comm_epoch
),
processes as (
    select host, pid, max(rank) as rank
    from comm_matches
    group by host, pid
),
printed as (
    select
        file,
        line,
        max(count) as elements,
        max(dtype) as dtype,
        max(opcount) as opcount
    from nccl_ops
    group by file, line
)
select
    coalesce(m.rank, s.rank, p.rank) as rank,
    coalesce(m.pg, s.pg) as pg,
    m.state,
    m.op,
    m.attempt,
    m.record_pid,
    m.seq,
    m.part,
    m.parts,
    c.step,
    c.purpose,
    c.dtype as record_dtype,
    m.record_bytes,
    m.line_bytes,
    o.dtype as line_dtype,
    o.elements,
    o.opcount,
    m.comm,
    m.file,
    m.line,
    m.reason
from matches m
left join serving s
    on s.host = m.host and s.pid = m.line_pid and s.comm = m.comm and s.comm_epoch = m.comm_epoch
left join processes p on p.host = m.host and p.pid = m.line_pid
left join collectives c
    on c.rank = m.rank and c.attempt = m.attempt and c.pid = m.record_pid and c.seq = m.seq
left join printed o on o.file = m.file and o.line = m.line
