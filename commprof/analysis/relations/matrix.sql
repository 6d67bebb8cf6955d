-- The modelled bytes that each rank sends to each other rank. The model uses the operations as they
-- were issued.
--
-- grain: one row per combination of the requested columns, attempt, sender and receiver
-- inputs: operations, ranks_of_groups, rank_hosts
-- requested: by, attempt, op, group_ranks, group_size, root, sender, receiver, backend
-- The model assumes these routes. The bytes of an all_reduce, a reduce_scatter or an all_gather go
-- around a ring in the order of the group. The bytes of a reduce or a gather go from every other
-- rank to the root. The bytes of a broadcast or a scatter go from the root to every other rank. The
-- bytes of an all_to_all go between all pairs of ranks, and follow the splits if these are
-- recorded. The bytes of a send go from the sender to the receiver. The columns sender and receiver
-- are null for bytes whose pairs of ranks are not known. The sum of wire_bytes over all rows equals
-- the wire bytes of all operations, summed over all ranks.
--
-- The column message_bytes contains the bytes of sends. The column alike_bytes contains executed
-- bytes. It covers only operations that the backend runs between the same pairs of ranks as the
-- model. These are messages, and with gloo also all_gather, all_to_all, gather and scatter. The
-- column between_hosts_bytes is the part of wire_bytes that is sent between ranks on different
-- hosts. It is null if a host is not known.
with flows as (
    select
        {flow} wire_ranks,
        sum(cast(wire_share as double) * case when op = 'send' then 1 else group_size end) / wire_ranks as wire_bytes,
        sum(case when op = 'send' then cast(payload_bytes as double) else 0 end) as message_bytes,
        sum(
            case
                when unexecuted = 0 and (
                    op = 'send' or backend = 'gloo' and op in ('all_gather', 'all_to_all', 'gather', 'scatter')
                )
                then cast(executed_share as double) * case when op = 'send' then 1 else group_size end
                else 0
            end
        ) / wire_ranks as alike_bytes
    from operations
    where wire_share <> 0
    group by {flow} wire_ranks
),
routed as (
    select
        f.*,
        case
            when f.op = 'send' or f.sender is not null
            then case when s.position is not null and r.position is not null then 'pair' end
            when f.op in ('all_reduce', 'reduce_scatter', 'all_gather') then 'ring'
            when f.op = 'all_to_all' then 'each'
            when o.position is null then null
            when f.op in ('reduce', 'gather') then 'to_root'
            when f.op in ('broadcast', 'scatter') then 'from_root'
        end as route
    from flows f
    left join ranks_of_groups s on s.group_ranks = f.group_ranks and s.rank = f.sender
    left join ranks_of_groups r on r.group_ranks = f.group_ranks and r.rank = f.receiver
    left join ranks_of_groups o on o.group_ranks = f.group_ranks and o.rank = f.root
),
placed as (
    select
        {asked_of_f}
        case when f.route = 'pair' then f.sender end as sender,
        case when f.route = 'pair' then f.receiver end as receiver,
        f.wire_bytes,
        case when f.route = 'pair' then f.message_bytes else 0 end as message_bytes,
        f.alike_bytes
    from routed f
    where f.route is null or f.route = 'pair'
    union all
    select
        {asked_of_f}
        m.rank as sender,
        n.rank as receiver,
        f.wire_bytes / f.group_size as wire_bytes,
        0 as message_bytes,
        f.alike_bytes / f.group_size as alike_bytes
    from routed f
    join ranks_of_groups m on m.group_ranks = f.group_ranks
    join ranks_of_groups n on n.group_ranks = m.group_ranks and n.position = (m.position + 1) % f.group_size
    where f.route = 'ring'
    union all
    select
        {asked_of_f}
        case when f.route = 'to_root' then m.rank else f.root end as sender,
        case when f.route = 'to_root' then f.root else m.rank end as receiver,
        f.wire_bytes / (f.group_size - 1) as wire_bytes,
        0 as message_bytes,
        f.alike_bytes / (f.group_size - 1) as alike_bytes
    from routed f
    join ranks_of_groups m on m.group_ranks = f.group_ranks and m.rank <> f.root
    where f.route in ('to_root', 'from_root')
    union all
    select
        {asked_of_f}
        m.rank as sender,
        n.rank as receiver,
        f.wire_bytes / f.group_size / (f.group_size - 1) as wire_bytes,
        0 as message_bytes,
        f.alike_bytes / f.group_size / (f.group_size - 1) as alike_bytes
    from routed f
    join ranks_of_groups m on m.group_ranks = f.group_ranks
    join ranks_of_groups n on n.group_ranks = m.group_ranks and n.rank <> m.rank
    where f.route = 'each'
)
select
    {asked_of_p}
    p.sender,
    p.receiver,
    sum(p.wire_bytes) as wire_bytes,
    cast(sum(p.message_bytes) as bigint) as message_bytes,
    sum(p.alike_bytes) as alike_bytes,
    case
        when count(*) = count(case when a.host is not null and b.host is not null then 1 end)
        then sum(case when a.host <> b.host then p.wire_bytes else 0.0 end)
    end as between_hosts_bytes
from placed p
left join rank_hosts a on a.attempt = p.attempt and a.rank = p.sender
left join rank_hosts b on b.attempt = p.attempt and b.rank = p.receiver
group by {asked_of_p} p.sender, p.receiver
