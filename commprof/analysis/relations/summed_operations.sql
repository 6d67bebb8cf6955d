-- The collectives and messages of steps that were recorded as sums (--aggregate, --max-size).
--
-- grain: one row per attempt, pg, group_ranks, group_size, step, after_step, phase, op, intended_op, purpose and is_p2p
-- inputs: aggregates, groups
-- The column collectives is the largest count of any rank, and times are means over the ranks. For
-- messages both are sums over the ranks, because a message counts once, at its send. The column backend contains the group's backend if the group
-- uses the same backend for all devices. The column group_desc is torch's description of the group.
with named as (
    select
        pg,
        split_part(split_part(coalesce(backend, ''), ',', 1), ':', -1) as first,
        split_part(split_part(coalesce(backend, ''), ',', 2), ':', -1) as second,
        split_part(split_part(coalesce(backend, ''), ',', 3), ':', -1) as third,
        split_part(coalesce(backend, ''), ',', 4) as others
    from groups
),
backends as (
    select pg, max(first) as backend
    from named
    group by pg
    having min(first) = max(first)
        and min(first) <> ''
        and max(case when second in ('', first) and third in ('', first) and others = '' then 0 else 1 end) = 0
),
described as (
    select attempt, pg, group_ranks, max(group_desc) as group_desc
    from groups
    group by attempt, pg, group_ranks
),
of_rank as (
    select
        attempt, pg, group_ranks, group_size, step, after_step, phase, op, intended_op, purpose, is_p2p, rank,
        cast(sum(calls) as bigint) as calls,
        cast(sum(payload_bytes) as bigint) as payload_bytes,
        sum(host_ns) as host_ns,
        sum(exposed_ns) as exposed_ns
    from aggregates
    group by attempt, pg, group_ranks, group_size, step, after_step, phase, op, intended_op, purpose, is_p2p, rank
)
select
    s.attempt,
    s.pg,
    s.group_ranks,
    s.group_size,
    b.backend,
    d.group_desc,
    s.step,
    s.after_step,
    s.phase,
    s.op,
    s.intended_op,
    s.purpose,
    s.is_p2p,
    cast(sum(s.calls) as bigint) as records,
    cast(case
        when s.op = 'recv' then 0 when s.is_p2p then sum(s.calls) else max(s.calls)
    end as bigint) as collectives,
    cast(case
        when s.op = 'recv' then 0
        when s.is_p2p then sum(s.payload_bytes)
        when s.op = 'all_to_all' then round(avg(s.payload_bytes))
        else max(s.payload_bytes)
    end as bigint) as payload_bytes,
    cast(case when s.is_p2p then sum(s.host_ns) else avg(s.host_ns) end as double) as host_ns,
    cast(case when s.is_p2p then sum(s.exposed_ns) else avg(s.exposed_ns) end as double) as exposed_ns
from of_rank s
left join backends b on b.pg = s.pg
left join described d on d.attempt = s.attempt and d.pg = s.pg and d.group_ranks = s.group_ranks
group by
    s.attempt, s.pg, s.group_ranks, s.group_size, b.backend, d.group_desc, s.step, s.after_step, s.phase, s.op, s.intended_op,
    s.purpose, s.is_p2p
