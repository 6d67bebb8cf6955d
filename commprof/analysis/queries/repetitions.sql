-- The records of collectives, and for the how manieth time their rank gave that number in that group.
--
-- Input:  collectives
-- Output: its rows that are no messages, with their repetition. Only those whose number comes more than once are put in order.
with often as (
    select attempt, pg, group_ranks, pg_seq
    from collectives
    where op not in ('send', 'recv')
    group by attempt, pg, group_ranks, pg_seq, rank
    having count(*) > 1
)
select c.*, 1 as repetition
from collectives c
where c.op not in ('send', 'recv') and not exists (
    select 1
    from often o
    where o.attempt = c.attempt and o.pg = c.pg and o.group_ranks = c.group_ranks and o.pg_seq = c.pg_seq
)
union all
select
    c.*,
    row_number() over (
        partition by c.rank, c.attempt, c.pg, c.group_ranks, c.pg_seq
        order by c.issue_ns, c.seq
    ) as repetition
from collectives c
where c.op not in ('send', 'recv') and exists (
    select 1
    from often o
    where o.attempt = c.attempt and o.pg = c.pg and o.group_ranks = c.group_ranks and o.pg_seq = c.pg_seq
)
