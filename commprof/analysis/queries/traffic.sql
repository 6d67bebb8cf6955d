-- Operations, bytes and times for each combination of the grouping columns.
--
-- Input:  operations (see operations.sql)
-- The columns to group by are put in: each followed by a comma, and as the clauses that group and order by them.
with of_size as (
    select
        {by}
        wire_ranks,
        sum(collectives) as collectives,
        sum(records) as records,
        sum(payload_bytes) as payload_bytes,
        sum(padding_bytes) as padding_bytes,
        cast(sum(cast(wire_share as decimal(38, 0))) as double) / wire_ranks as wire_bytes,
        cast(sum(cast(executed_share as decimal(38, 0))) as double) / wire_ranks as executed_bytes,
        sum(unexecuted) as unexecuted,
        cast(sum(cast(between_share as decimal(38, 0))) as double) / wire_ranks as between_hosts_bytes,
        sum(unlocated) as unlocated,
        sum(host_ns) as host_ns,
        sum(exposed_ns) as exposed_ns,
        sum(timed) as timed,
        sum(tensors) as tensors
    from operations
    group by {by} wire_ranks
)
select
    {by}
    cast(coalesce(sum(collectives), 0) as bigint) as collectives,
    cast(coalesce(sum(records), 0) as bigint) as records,
    cast(coalesce(sum(payload_bytes), 0) as bigint) as payload_bytes,
    cast(sum(padding_bytes) as bigint) as padding_bytes,
    coalesce(sum(wire_bytes), 0.0) as wire_bytes,
    case when coalesce(sum(unexecuted), 0) = 0 then coalesce(sum(executed_bytes), 0.0) end as executed_wire_bytes,
    case when coalesce(sum(unlocated), 0) = 0 then coalesce(sum(between_hosts_bytes), 0.0) end as between_hosts_bytes,
    cast(round(sum(host_ns)) as bigint) as host_ns,
    cast(round(sum(exposed_ns)) as bigint) as exposed_ns,
    cast(coalesce(sum(tensors), 0) as bigint) as tensors,
    cast(coalesce(sum(timed), 0) as bigint) as timed
from of_size
{group_by}
{order_by}
