-- The records of collectives. The column repetition distinguishes collectives that have the same
-- pg_seq.
--
-- grain: one row per record of a collective; records of sends and recvs are excluded
-- inputs: records=collectives
-- The records of one collective have the same values of attempt, pg, group_ranks and pg_seq. The
-- column group_ranks is needed to identify a collective, because groups without common ranks may
-- have the same name. A rank takes part in a collective only once. If a group is destroyed and a
-- later group has the same name, the values of pg_seq begin again at 0. In this case repetition
-- distinguishes the collectives of the two groups. The column repetition is counted from 1.
with repeated as (
    select attempt, pg, group_ranks, pg_seq, rank
    from records
    where op not in ('send', 'recv')
    group by attempt, pg, group_ranks, pg_seq, rank
    having count(*) > 1
),
numbered as (
    select
        r.attempt,
        r.pg,
        r.group_ranks,
        r.pid,
        r.rank,
        r.seq,
        r.issue_ns,
        row_number() over (
            partition by r.attempt, r.pg, r.group_ranks, r.pg_seq, r.rank
            order by r.issue_ns, r.seq
        ) as repetition
    from records r
    join repeated p
        on p.attempt = r.attempt
        and p.pg = r.pg
        and p.group_ranks = r.group_ranks
        and p.pg_seq = r.pg_seq
        and p.rank = r.rank
    where r.op not in ('send', 'recv')
)
select r.*, coalesce(n.repetition, 1) as repetition
from records r
left join numbered n
    on n.attempt = r.attempt
    and n.pid = r.pid
    and n.rank = r.rank
    and n.seq = r.seq
where r.op not in ('send', 'recv')
