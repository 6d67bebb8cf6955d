-- All sends and recvs. The column counted tells whether a record counts as a message.
--
-- grain: one row per record of a send or recv
-- inputs: collectives
-- A message counts once, at its send. A recv counts (counted = 1) only if no rank recorded its
-- send, for example because the sender was not recorded. Sends and recvs are paired by their order.
-- A recv that accepts any source is paired with a send that has no other recv.
with numbered as (
    select
        c.*,
        row_number() over (
            partition by attempt, pg, group_ranks, op, rank, peer
            order by issue_ns, seq
        ) as nth
    from collectives c
    where op in ('send', 'recv')
),
named as (
    select
        r.attempt,
        r.pid,
        r.rank,
        r.seq,
        r.pg,
        r.group_ranks,
        case when s.rank is null then 0 else 1 end as has_send
    from numbered r
    left join numbered s
        on s.op = 'send'
        and s.attempt = r.attempt
        and s.pg = r.pg
        and s.group_ranks = r.group_ranks
        and s.rank = r.peer
        and s.peer = r.rank
        and s.nth = r.nth
    where r.op = 'recv' and r.peer >= 0
),
arriving as (
    select attempt, pg, group_ranks, destination, sum(arrivals) as spare
    from (
        select attempt, pg, group_ranks, peer as destination, 1 as arrivals from numbered where op = 'send'
        union all
        select attempt, pg, group_ranks, rank as destination, -has_send as arrivals from named
    ) a
    group by attempt, pg, group_ranks, destination
)
select
    m.*,
    case
        when m.op = 'send' then 1
        when m.peer >= 0 then 1 - n.has_send
        when m.nth > coalesce(a.spare, 0) then 1
        else 0
    end as counted,
    case when m.op = 'send' then m.rank else m.peer end as sender,
    case when m.op = 'send' then m.peer else m.rank end as receiver
from numbered m
left join named n
    on m.op = 'recv' and n.attempt = m.attempt and n.pid = m.pid and n.rank = m.rank and n.seq = m.seq
left join arriving a
    on m.op = 'recv' and a.attempt = m.attempt and a.pg = m.pg
    and a.group_ranks = m.group_ranks and a.destination = m.rank
