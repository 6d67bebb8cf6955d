-- Every operation once, whatever the number of ranks that recorded it.
--
-- Input:  agreed (see commprof.analysis.members: collectives, each once), point_to_point (the records of messages), aggregates
-- Output: one row per collective (collectives = 1) and one per point-to-point record (collectives = 1 for a send, and
--         for a recv whose send no rank recorded; 0 for the other recvs, whose message is counted at its send).
--
-- The length of an all_to_all may differ between ranks: it is the mean. Elsewhere the largest is the whole. What an all_to_all
-- with unequal splits sent is in rows for pairs of ranks, which are no collectives and have a sender and a receiver.
--
-- root is the root, source or destination of a collective, -1 where it has none or it is not known; a message has a sender
-- and a receiver.
--
-- executed_share is wire_share of what the backend runs (commprof.ledger.backends): of gloo that is known. call_bytes is the
-- payload of one call, where what each rank sends is no fixed part of it: of gloo's reduce. Else it is null.
--
-- What a run kept as sums is in neither of these records: each of its combinations is one row with as many collectives as the
-- rank with most of them issued, and the time of a mean rank. A recv counts at its send. Of how many exposed_ns was known
-- the sums do not say: timed is 0.
with numbered as (
    select
        c.*,
        row_number() over (
            partition by attempt, pg, group_ranks, op, rank, peer
            order by issue_ns, seq
        ) as nth
    from point_to_point c
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
        attempt, pg, group_ranks, group_size, backend, step, phase, op, intended_op, purpose, is_p2p, rank,
        cast(sum(calls) as bigint) as calls,
        cast(sum(payload_bytes) as bigint) as payload_bytes,
        sum(host_ns) as host_ns,
        sum(exposed_ns) as exposed_ns
    from aggregates
    group by attempt, pg, group_ranks, group_size, backend, step, phase, op, intended_op, purpose, is_p2p, rank
),
summed as (
    select
        attempt, pg, group_ranks, group_size, backend, step, phase, op, intended_op, purpose,
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
    group by attempt, pg, group_ranks, group_size, backend, step, phase, op, intended_op, purpose, is_p2p
),
operations as (
    select
        attempt, pg, group_ranks, step, after_step, micro_step, phase, op, intended_op, purpose, bucket, owner, dtype,
        reduce_op, backend, device, group_desc, group_size, api, call_site, records, tensors,
        collectives,
        case when op = 'all_to_all' then cast(round(mean_bytes) as bigint) else largest_bytes end as payload_bytes,
        host_ns, exposed_ns, timed, root, sender, receiver, sent_bytes
    from agreed
    union all
    select
        attempt, pg, group_ranks, step, after_step, micro_step, phase, op, intended_op, purpose, bucket, owner, dtype,
        reduce_op, backend, device, group_desc, group_size, api, call_site, 1 as records,
        counted * num_tensors as tensors,
        counted as collectives,
        counted * payload_bytes as payload_bytes,
        cast(return_ns - issue_ns as double) as host_ns, cast(exposed_ns as double) as exposed_ns,
        case when exposed_ns is null then 0 else 1 end as timed,
        -1 as root,
        case when op = 'send' then rank else peer end as sender,
        case when op = 'send' then peer else rank end as receiver,
        null as sent_bytes
    from messages
    union all
    select
        attempt, pg, group_ranks, step, null as after_step, null as micro_step, phase,
        op, intended_op, purpose, null as bucket, null as owner,
        null as dtype, null as reduce_op, backend, null as device, null as group_desc, group_size, null as api,
        null as call_site, records, 0 as tensors, collectives, payload_bytes, host_ns, exposed_ns,
        0 as timed, -1 as root, null as sender, null as receiver, null as sent_bytes
    from summed
),
-- Of gloo's reduce, for one call: bytes of a segment, and segments of a rank's chunk. The same as in commprof.ledger.backends.
segmented as (
    select
        o.*,
        cast(floor(payload_bytes / cast(greatest(collectives, 1) as double)) as bigint) as each_bytes,
        greatest(1, least(1048576, cast(
            ceil(floor(payload_bytes / cast(greatest(collectives, 1) as double)) / (2.0 * greatest(group_size, 1))) as bigint
        ))) as segment_bytes
    from operations o
),
chunked as (
    select
        s.*,
        greatest(2, cast(
            ceil(ceil(each_bytes / cast(segment_bytes as double)) / greatest(group_size, 1)) as bigint
        )) * segment_bytes as chunk_bytes
    from segmented s
),
kept as (
    select
        c.*,
        cast(floor(each_bytes / cast(chunk_bytes as double)) as bigint) as chunks
    from chunked c
),
shared as (
    select
        k.*,
        -- wire_bytes = wire_share / wire_ranks: kept as integers, so that sums are exact and in any order the same
        case
            when sent_bytes is not null then sent_bytes
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
    from kept k
)
select
    s.*,
    case when op = 'reduce' and backend = 'gloo' then each_bytes end as call_bytes,
    -- what the backend is known to run, in the same parts; null where that is not known
    case
        when wire_share = 0 or op = 'send' then wire_share
        when backend is null or backend <> 'gloo' then null
        when op = 'reduce_scatter' then 2 * wire_share
        when op = 'reduce' then collectives * (
            (group_size + 1) * each_bytes
            - chunks * 2 * segment_bytes
            - case
                when chunks >= group_size then 0
                else greatest(0, least(2 * segment_bytes, each_bytes - (chunks + 1) * chunk_bytes + 2 * segment_bytes))
            end
            - cast(floor(each_bytes / cast(group_size as double)) as bigint)
        )
        else wire_share
    end as executed_share
from shared s
