-- Every operation once, whatever the number of ranks that recorded it.
--
-- Input:  collectives, aggregates
-- Output: one row per collective (collectives = 1) and one per point-to-point record (collectives = 1 for a send, and
--         for a recv whose send no rank recorded; 0 for the other recvs, whose message is counted at its send).
--
-- The members of a collective share attempt, pg, group_ranks and pg_seq. group_ranks is part of the identity because
-- disjoint groups may carry one name. A rank takes part in a collective once: where a name was used again after its
-- group was destroyed, and the numbers began anew, the repetition tells the two apart.
-- What the ranks must agree on is taken from the lowest rank; a tag from any rank that carries it.
-- The length of an all_to_all may differ between ranks: it is the mean. Elsewhere the largest is the whole.
--
-- root is the root, source or destination of a collective, -1 where it has none or it is not known; a message has a sender
-- and a receiver.
--
-- What a run kept as sums is in neither of these records: each of its combinations is one row with as many collectives as the
-- rank with most of them issued, and the time of a mean rank. A recv counts at its send.
with repeated as (
    select
        c.*,
        row_number() over (
            partition by rank, attempt, pg, group_ranks, pg_seq
            order by issue_ns, seq
        ) as repetition
    from collectives c
    where op not in ('send', 'recv')
),
shared as (
    select
        attempt,
        pg,
        group_ranks,
        max_by(step, -rank) as step,
        max(after_step) as after_step,
        max_by(micro_step, -rank) as micro_step,
        max_by(phase, -rank) as phase,
        max_by(op, -rank) as op,
        max(intended_op) as intended_op,
        max(purpose) as purpose,
        max(bucket) as bucket,
        max(owner) as owner,
        max(dtype) as dtype,
        max(reduce_op) as reduce_op,
        max(backend) as backend,
        max_by(device, -rank) as device,
        max(group_desc) as group_desc,
        max(group_size) as group_size,
        max_by(api, -rank) as api,
        max_by(call_site, -rank) as call_site,
        max_by(peer, -rank) as root,
        count(*) as records,
        max(num_tensors) as tensors,
        max(payload_bytes) as largest_bytes,
        max(padding_bytes) as padding_bytes,
        avg(payload_bytes) as mean_bytes,
        avg(return_ns - issue_ns) as host_ns,
        avg(exposed_ns) as exposed_ns,
        count(exposed_ns) as timed
    from repeated
    group by attempt, pg, group_ranks, pg_seq, repetition
),
numbered as (
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
),
messages as (
    select
        m.*,
        case
            when m.op = 'send' then 1
            when m.peer >= 0 then 1 - n.has_send
            when m.nth > coalesce(a.spare, 0) then 1
            else 0
        end as counted
    from numbered m
    left join named n
        on m.op = 'recv' and n.attempt = m.attempt and n.pid = m.pid and n.rank = m.rank and n.seq = m.seq
    left join arriving a
        on m.op = 'recv' and a.attempt = m.attempt and a.pg = m.pg
        and a.group_ranks = m.group_ranks and a.destination = m.rank
),
sums as (
    select
        attempt, pg, group_ranks, group_size, step, phase, op, intended_op, purpose, is_p2p, rank,
        cast(sum(calls) as bigint) as calls,
        cast(sum(payload_bytes) as bigint) as payload_bytes,
        sum(host_ns) as host_ns,
        sum(exposed_ns) as exposed_ns
    from aggregates
    group by attempt, pg, group_ranks, group_size, step, phase, op, intended_op, purpose, is_p2p, rank
),
summed as (
    select
        attempt, pg, group_ranks, group_size, step, phase, op, intended_op, purpose,
        cast(sum(calls) as bigint) as records,
        cast(case when op = 'recv' then 0 when is_p2p then sum(calls) else max(calls) end as bigint) as collectives,
        cast(case
            when op = 'recv' then 0
            when is_p2p then sum(payload_bytes)
            when op = 'all_to_all' then round(avg(payload_bytes))
            else max(payload_bytes)
        end as bigint) as payload_bytes,
        cast(case when is_p2p then sum(host_ns) else avg(host_ns) end as double) as host_ns,
        cast(case when is_p2p then sum(exposed_ns) else avg(exposed_ns) end as double) as exposed_ns
    from sums
    group by attempt, pg, group_ranks, group_size, step, phase, op, intended_op, purpose, is_p2p
),
operations as (
    select
        attempt, pg, group_ranks, step, after_step, micro_step, phase, op, intended_op, purpose, bucket, owner, dtype,
        reduce_op, backend, device, group_desc, group_size, api, call_site, records, tensors,
        1 as collectives,
        case when op = 'all_to_all' then cast(round(mean_bytes) as bigint) else largest_bytes end as payload_bytes,
        padding_bytes,
        host_ns, exposed_ns, timed, root, null as sender, null as receiver
    from shared
    union all
    select
        attempt, pg, group_ranks, step, after_step, micro_step, phase, op, intended_op, purpose, bucket, owner, dtype,
        reduce_op, backend, device, group_desc, group_size, api, call_site, 1 as records,
        counted * num_tensors as tensors,
        counted as collectives,
        counted * payload_bytes as payload_bytes,
        counted * padding_bytes as padding_bytes,
        cast(return_ns - issue_ns as double) as host_ns, cast(exposed_ns as double) as exposed_ns,
        case when exposed_ns is null then 0 else 1 end as timed,
        -1 as root,
        case when op = 'send' then rank else peer end as sender,
        case when op = 'send' then peer else rank end as receiver
    from messages
    union all
    select
        attempt, pg, group_ranks, step, null as after_step, null as micro_step, phase, op, intended_op, purpose, null as bucket, null as owner,
        null as dtype, null as reduce_op, null as backend, null as device, null as group_desc, group_size, null as api,
        null as call_site, records, 0 as tensors, collectives, payload_bytes, null as padding_bytes, host_ns, exposed_ns,
        0 as timed, -1 as root, null as sender, null as receiver
    from summed
)
select
    o.*,
    -- wire_bytes = wire_share / wire_ranks: kept as integers, so that sums are exact and in any order the same
    case
        when op = 'send' then payload_bytes
        when op in ('recv', 'barrier') or group_size < 2 then 0
        when op = 'all_reduce' then 2 * (group_size - 1) * payload_bytes
        else (group_size - 1) * payload_bytes
    end as wire_share,
    case
        when op = 'send' or group_size < 2 then 1
        when op in ('gather', 'scatter') then group_size * group_size
        else group_size
    end as wire_ranks
from operations o
