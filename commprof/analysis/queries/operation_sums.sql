-- The operations of a run, added up for each combination of the columns that a question needs.
--
-- Input: agreed, point_to_point, aggregates
-- Put in: the question operations.sql, of which an engine works out no more than is needed, and the columns, each followed
-- by a comma. Sums of these sums are those of the operations: wire_bytes is wire_share / wire_ranks, and
-- executed_wire_bytes is executed_share / wire_ranks where unexecuted, the operations of which it is not known, is 0.
with operations as (
{operations}
)
select
    {by}
    wire_ranks,
    cast(sum(collectives) as bigint) as collectives,
    cast(sum(records) as bigint) as records,
    cast(sum(payload_bytes) as bigint) as payload_bytes,
    sum(cast(wire_share as decimal(38, 0))) as wire_share,
    sum(cast(executed_share as decimal(38, 0))) as executed_share,
    cast(sum(case when executed_share is null then 1 else 0 end) as bigint) as unexecuted,
    sum(host_ns) as host_ns,
    sum(exposed_ns) as exposed_ns,
    cast(sum(timed) as bigint) as timed,
    cast(sum(tensors) as bigint) as tensors
from operations
group by {by} wire_ranks
