-- What the whole training steps sent together, by operation, intended operation and purpose.
--
-- Input: steps, operations (see operations.sql)
-- A step is whole when it ended on every rank that began it: a step that the run was killed in sent only a part.
-- Barriers and what was sent before the first step are left out.
with whole as (
    select attempt, step
    from steps
    where step >= 0
    group by attempt, step
    having count(end_ns) = count(*)
),
of_size as (
    select
        o.op,
        o.intended_op,
        o.purpose,
        o.wire_ranks,
        sum(o.collectives) as collectives,
        sum(o.payload_bytes) as payload_bytes,
        cast(sum(cast(o.wire_share as decimal(38, 0))) as double) / o.wire_ranks as wire_bytes
    from operations o
    join whole w on w.attempt = o.attempt and w.step = o.step
    where o.op <> 'barrier'
    group by o.op, o.intended_op, o.purpose, o.wire_ranks
)
select
    op,
    intended_op,
    purpose,
    cast(sum(collectives) as bigint) as collectives,
    cast(sum(payload_bytes) as bigint) as payload_bytes,
    sum(wire_bytes) as wire_bytes
from of_size
group by op, intended_op, purpose
having sum(collectives) > 0
order by op, intended_op, purpose
