-- The rows of an alignment in the order of the log, which is that of issue: records without a line stand after the record
-- before them, lines without a record after the line before them.
--
-- Input:  matches (with file_row_number, the number of each row), comm_matches
-- Output: what is selected at the end from placed (every row with its rank and group) or numbered (the chosen ones, with
--         their position within the rank and group, from 0). A line without a record has the rank of its process and the group
--         of its communicator.
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
placed as (
    select file_row_number as number, rank, pg, state, op, attempt, seq, part, file, line
    from matches
    where rank is not null and pg is not null
    union all
    select
        m.file_row_number as number,
        coalesce(m.rank, s.rank, p.rank) as rank,
        coalesce(m.pg, s.pg) as pg,
        m.state, m.op, m.attempt, m.seq, m.part, m.file, m.line
    from matches m
    left join serving s
        on s.host = m.host and s.pid = m.line_pid and s.comm = m.comm and s.comm_epoch = m.comm_epoch
    left join processes p on p.host = m.host and p.pid = m.line_pid
    where m.rank is null or m.pg is null
),
-- The files of a rank in the order in which its records were issued.
files as (
    select file, dense_rank() over (order by began) as place
    from (
        select
            file,
            coalesce(min(cast(attempt as double) * 4611686018427387904.0 + cast(seq as double)), 0.0) as began
        from matches
        where file is not null
        group by file
    ) f
),
lined as (
    select
        p.number, p.rank, p.pg, p.state, p.attempt, p.seq, p.part, p.line,
        coalesce(f.place * 1099511627776 + p.line, -1) as place
    from placed p
    left join files f on f.file = p.file
    where {chosen}
),
seated as (
    select
        lined.*,
        case
            when seq is null then place
            else max(place) over (
                partition by rank, pg, case when seq is null then 1 else 0 end
                order by attempt, seq, coalesce(part, 0), number
                rows between unbounded preceding and current row
            )
        end as seat,
        case when seq is null then 2 when line is null then 1 else 0 end as behind
    from lined
),
numbered as (
    select
        seated.*,
        row_number() over (
            partition by rank, pg
            order by
                seat, behind, coalesce(attempt, 2147483647), coalesce(seq, 4611686018427387904), coalesce(part, 0), number
        ) - 1 as position
    from seated
)
{answer}
