-- How long each collective and each message took, from when it could begin until it had ended.
--
-- Input:  arrivals (see commprof.align.ranks.rank_arrivals), with further columns of their records
-- Output: one row per collective or message with a payload, among two ranks or more.
--
-- Times of the ranks of a collective are counted from the first arrival, on one clock (lateness_ns). Waiting for a rank that comes
-- late is no part of the transfer, so it begins when the last of those has come (and on a device: has begun) without whom no
-- data can flow:
--     all_reduce, reduce_scatter, all_gather, all_to_all   all ranks;                end: the last rank has its result
--     reduce, gather                                       all ranks;                end: the root has it
--     broadcast, scatter                                   the root and a receiver;  end: that receiver has it; the longest counts
--     messages                                             sender and receiver;      end: the receiver has it
-- The end of a record is the best that is known: by the device, by the backend (sampled), by a wait that was real, or by the
-- return of a synchronous call on the CPU, which includes the transfer. On a GPU the host's times say nothing of it.
with records as (
    select
        a.attempt, a.collective, a.step, a.op, a.purpose, a.pg, a.group_ranks, a.group_size, a.members, a.is_p2p, a.rank,
        a.peer, a.lateness_ns as arrived, a.lateness_error_ns as error_ns,
        a.backend, a.dtype, a.payload_bytes,
        a.lateness_ns + greatest(coalesce(a.device_begin_ns, a.issue_ns) - a.issue_ns, 0) as ready,
        case
            when a.status <> 'ok' then null
            when a.device_end_ns is not null and a.device = 'cpu' then 'sampled'
            when a.device_end_ns is not null then 'device'
            when coalesce(a.device, case when a.backend = 'gloo' then 'cpu' else 'unknown' end) <> 'cpu' then null
            when a.is_async and a.wait_end_ns - a.wait_begin_ns > 50000 then 'wait'
            when not a.is_async and coalesce(a.wait_end_ns, a.return_ns) is not null then 'host'
        end as time_source,
        a.lateness_ns + coalesce(a.device_end_ns, a.wait_end_ns, a.return_ns) - a.issue_ns as ended
    from arrivals a
    where a.op <> 'barrier' and a.group_size > 1
),
placed as (
    select
        r.*,
        case when is_p2p then op = 'recv' else rank = peer end as is_root,
        case when time_source is not null then ended end as known_end
    from records r
),
summed as (
    select
        attempt,
        collective,
        max(step) as step,
        min(case when is_p2p then 'send' else op end) as op,
        max(purpose) as purpose,
        max(backend) as backend,
        min(pg) as pg,
        min(group_ranks) as group_ranks,
        max(group_size) as group_size,
        max(dtype) as dtype,
        max(payload_bytes) as largest_bytes,
        avg(payload_bytes) as mean_bytes,
        max(error_ns) as error_ns,
        max(ready) as all_ready,
        max(known_end) as last_end,
        max_by(time_source, known_end) as last_source,
        max(case when is_root then ready end) as root_ready,
        max(case when is_root then known_end end) as root_end,
        max(case when is_root then time_source end) as root_source,
        count(*) = max(case when is_p2p then 2 else group_size end) and count(arrived) = count(*) as is_whole
    from placed
    group by attempt, collective
),
received as (
    select
        p.attempt,
        p.collective,
        max(p.known_end - greatest(p.ready, s.root_ready)) as longest,
        max_by(p.time_source, p.known_end - greatest(p.ready, s.root_ready)) as longest_source
    from placed p
    join summed s on s.attempt = p.attempt and s.collective = p.collective
    where p.op in ('broadcast', 'scatter') and not p.is_root
    group by p.attempt, p.collective
)
select
    s.attempt, s.step, s.op, s.purpose, s.backend, s.pg, s.group_ranks, s.group_size, s.dtype,
    case when s.op = 'all_to_all' then cast(round(s.mean_bytes) as bigint) else s.largest_bytes end as payload_bytes,
    s.error_ns,
    case
        when not s.is_whole then null
        when s.op in ('broadcast', 'scatter') then r.longest
        when s.op in ('reduce', 'gather', 'send') then s.root_end - s.all_ready
        else s.last_end - s.all_ready
    end as time_ns,
    case
        when not s.is_whole then null
        when s.op in ('broadcast', 'scatter') then r.longest_source
        when s.op in ('reduce', 'gather', 'send') then s.root_source
        else s.last_source
    end as time_source
from summed s
left join received r on r.attempt = s.attempt and r.collective = s.collective
where s.largest_bytes > 0
order by s.attempt, s.collective
