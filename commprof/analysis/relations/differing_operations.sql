-- Individual collectives on which the ranks of a group differ, or whose splits are recorded. If the
-- splits are recorded, the relation also contains the bytes that each pair of ranks exchanges.
--
-- grain: one row per such collective; for pairs of ranks, one row per combination of the requested
--   columns, sender and receiver
-- inputs: differing_members=collective_members(records=differing_records),
--   differing=deduplicated_collectives(members=differing_members), differing_exchanges=exchanges(members=differing_members)
-- In the row of a pair of ranks, the column collectives is 0, and the column sent_bytes contains
-- the bytes that the sender sends to the receiver. If a collective has such rows, the column
-- sent_bytes is 0 in the row of the collective itself.
with known_exchanges as (
    select attempt, pg, group_ranks, pg_seq, repetition
    from differing_exchanges
    group by attempt, pg, group_ranks, pg_seq, repetition
    having count(sent_bytes) = count(*)
),
of_differing as (
    select
        d.*,
        case when d.op = 'reduce' and d.backend = 'gloo' then d.payload_bytes end as call_bytes,
        case when d.has_splits = 1 and k.pg_seq is null then -1 end as sender,
        case when d.has_splits = 1 and k.pg_seq is null then -1 end as receiver,
        case when d.has_splits = 1 and k.pg_seq is not null then 0 end as sent_bytes
    from differing d
    left join known_exchanges k
        on d.has_splits = 1
        and k.attempt = d.attempt
        and k.pg = d.pg
        and k.group_ranks = d.group_ranks
        and k.pg_seq = d.pg_seq
        and k.repetition = d.repetition
),
between_pairs as (
    select d.*, e.sender, e.receiver, e.sent_bytes, cast(null as bigint) as call_bytes
    from differing_exchanges e
    join known_exchanges k
        on k.attempt = e.attempt
        and k.pg = e.pg
        and k.group_ranks = e.group_ranks
        and k.pg_seq = e.pg_seq
        and k.repetition = e.repetition
    join differing d
        on d.attempt = e.attempt
        and d.pg = e.pg
        and d.group_ranks = e.group_ranks
        and d.pg_seq = e.pg_seq
        and d.repetition = e.repetition
    where e.sender <> e.receiver and e.sent_bytes <> 0
),
of_pairs as (
    select {by_and_pairs} cast(round(sum(sent_bytes)) as bigint) as sent_bytes
    from between_pairs
    group by {by_and_pairs} 1 + 0
)
select
    {by_and_pairs} 1 as collectives, records, tensors, payload_bytes, padding_bytes, host_ns, exposed_ns, timed, sent_bytes
from of_differing
union all
select
    {by_and_pairs} 0 as collectives, 0 as records, 0 as tensors, 0 as payload_bytes, null as padding_bytes,
    0.0 as host_ns, 0.0 as exposed_ns,
    0 as timed, sent_bytes
from of_pairs
