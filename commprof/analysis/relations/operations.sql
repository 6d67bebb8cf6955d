-- Deduplicated operations, summed for each combination of the requested columns.
--
-- grain: one row per combination of the requested columns and wire_ranks
-- inputs: agreement, differing_operations, messages, summed_operations, rank_hosts, group_spans
-- The rows of this relation can be summed further. The wire bytes of a row are wire_share /
-- wire_ranks. Both columns are integers, so a sum does not depend on the order of the rows. The
-- executed bytes of a row are executed_share / wire_ranks. These are the bytes of the operations
-- that the backend runs (commprof.ledger.records.backends). They are known for gloo. The column
-- unexecuted counts the summed rows whose executed bytes are not known. The column call_bytes is the
-- payload of a single reduce with gloo. It is needed because the traffic of this operation is not
-- proportional to its payload. It is null for all other operations.
--
-- The column root is the root of a collective, or -1 if the collective has no root. A message has a
-- sender and a receiver. If an all_to_all has recorded splits, its bytes are in separate rows, one
-- for each pair of ranks. Such a row has a sender and a receiver, and its collectives value is 0.
-- If the splits are not known, sender and receiver are -1. The column span is within_host or
-- between_hosts. The span of a message or of a pair of ranks depends on the hosts of the two ranks.
-- Every other span depends on the hosts of the group. The span is null if these hosts are not
-- known. The column padding_bytes is null if no runtime reports padding. The column between_share
-- is the part of wire_share whose span is between_hosts. The column unlocated counts the summed rows
-- that send bytes but whose span is not known. For collectives, the columns host_ns and
-- exposed_ns are means over the ranks, and these means are summed over the collectives. For messages,
-- the two columns are sums over the messages. The column timed counts the records whose exposed_ns is known.
with of_agreed as (
    select a.*, cast(null as int) as sender, cast(null as int) as receiver
    from agreement a
    where agree = 1
),
of_messages as (
    select
        m.*,
        -1 as root,
        cast(null as bigint) as call_bytes,
        cast(return_ns - issue_ns as double) as call_ns
    from messages m
),
of_sums as (
    select
        s.*,
        cast(null as int) as micro_step,
        cast(null as int) as bucket,
        cast(null as int) as owner,
        cast(null as varchar(1)) as dtype,
        cast(null as varchar(1)) as reduce_op,
        cast(null as varchar(1)) as device,
        cast(null as varchar(1)) as api,
        cast(null as varchar(1)) as call_site,
        -1 as root,
        cast(null as int) as sender,
        cast(null as int) as receiver,
        case
            when op = 'reduce' and backend = 'gloo'
            then cast(floor(payload_bytes / cast(greatest(collectives, 1) as double)) as bigint)
        end as call_bytes
    from summed_operations s
),
counted as (
    select
        {by_and_pairs} collectives, records, tensors, payload_bytes, padding_bytes, host_ns, exposed_ns, timed,
        cast(null as bigint) as sent_bytes
    from of_agreed
    union all
    select
        {by_and_pairs} collectives, records, tensors, payload_bytes, padding_bytes, host_ns, exposed_ns, timed, sent_bytes
    from differing_operations
    union all
    select
        {by_and_pairs} counted as collectives, 1 as records, counted * num_tensors as tensors, counted * payload_bytes as payload_bytes,
        counted * padding_bytes as padding_bytes, call_ns as host_ns, cast(exposed_ns as double) as exposed_ns,
        case when exposed_ns is null then 0 else 1 end as timed, null as sent_bytes
    from of_messages
    union all
    select
        {by_and_pairs} collectives, records, 0 as tensors, payload_bytes, null as padding_bytes, host_ns, exposed_ns, 0 as timed, null as sent_bytes
    from of_sums
),
located as (
    select
        c.*,
        case
            when c.sender is not null and a.host is not null and b.host is not null
            then case when a.host = b.host then 'within_host' else 'between_hosts' end
            -- A message of sums, or a recv from any source: its other rank is not known, but in a group of two.
            when c.op in ('send', 'recv') and g.span = 'between_hosts' and c.group_size > 2 then null
            when c.sender is null or c.sender < 0 then g.span
        end as span
    from counted c
    left join rank_hosts a on a.attempt = c.attempt and a.rank = c.sender
    left join rank_hosts b on b.attempt = c.attempt and b.rank = c.receiver
    left join group_spans g on g.attempt = c.attempt and g.group_ranks = c.group_ranks
),
-- Of gloo's reduce, for one call: bytes of a segment, and segments of a rank's chunk. The same as in commprof.ledger.records.backends.
segmented as (
    select
        c.*,
        greatest(1, least(1048576, cast(
            ceil(call_bytes / (2.0 * greatest(group_size, 1))) as bigint
        ))) as segment_bytes
    from located c
),
chunked as (
    select
        s.*,
        greatest(2, cast(
            ceil(ceil(call_bytes / cast(segment_bytes as double)) / greatest(group_size, 1)) as bigint
        )) * segment_bytes as chunk_bytes
    from segmented s
),
placed as (
    select
        c.*,
        cast(floor(call_bytes / cast(chunk_bytes as double)) as bigint) as chunks,
        case
            when sent_bytes is not null then sent_bytes
            when op = 'send' then payload_bytes
            when op in ('recv', 'barrier') or group_size < 2 then 0
            else cast(case when op = 'all_reduce' then 2 else 1 end * (group_size - 1) as decimal(12, 0))
                * cast(payload_bytes as decimal(19, 0))
        end as wire_share,
        case
            when op = 'send' or group_size < 2 then 1
            when op in ('gather', 'scatter') then group_size * group_size
            else group_size
        end as wire_ranks
    from chunked c
),
executed as (
    select
        p.*,
        case
            when wire_share = 0 or op = 'send' then wire_share
            when backend is null or backend <> 'gloo' then null
            when op = 'reduce_scatter' then 2 * wire_share
            when op = 'reduce' then cast(collectives as decimal(18, 0)) * cast(
                (group_size + 1) * call_bytes
                - chunks * 2 * segment_bytes
                - case
                    when chunks >= group_size then 0
                    else greatest(0, least(2 * segment_bytes, call_bytes - (chunks + 1) * chunk_bytes + 2 * segment_bytes))
                end
                - cast(floor(call_bytes / cast(group_size as double)) as bigint) as decimal(19, 0)
            )
            else wire_share
        end as executed_share
    from placed p
)
select
    {requested}
    wire_ranks,
    cast(sum(collectives) as bigint) as collectives,
    cast(sum(records) as bigint) as records,
    cast(sum(payload_bytes) as bigint) as payload_bytes,
    cast(sum(padding_bytes) as bigint) as padding_bytes,
    cast(sum(cast(wire_share as decimal(38, 0))) as decimal(38, 0)) as wire_share,
    cast(sum(cast(executed_share as decimal(38, 0))) as decimal(38, 0)) as executed_share,
    cast(sum(case when executed_share is null then 1 else 0 end) as bigint) as unexecuted,
    cast(sum(cast(case when span = 'between_hosts' then wire_share else 0 end as decimal(38, 0))) as decimal(38, 0)) as between_share,
    cast(sum(case when span is null and wire_share <> 0 then 1 else 0 end) as bigint) as unlocated,
    sum(host_ns) as host_ns,
    sum(exposed_ns) as exposed_ns,
    cast(sum(timed) as bigint) as timed,
    cast(sum(tensors) as bigint) as tensors
from executed
group by {requested} wire_ranks
