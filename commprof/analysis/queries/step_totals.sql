-- What each whole training step sent, by operation, intended operation, purpose, and name and size of the group.
--
-- Input: steps, operations (see operations.sql)
-- The number of ranks of the job is put in. All ranks of its group send a collective, one rank sends a message: wire_bytes is
-- what they send together over the ranks of the job, so that a sum over groups of any sizes is that of one rank of the job.
-- A step is whole when it ended on every rank that began it: a step that the run was killed in sent only a part.
-- Barriers and what was sent before the first step are left out.
with whole as (
    select attempt, step
    from steps
    where step >= 0
    group by attempt, step
    having count(end_ns) = count(*)
)
select
    o.attempt,
    o.step,
    o.op,
    o.intended_op,
    o.purpose,
    o.group_desc,
    o.group_size,
    cast(count(distinct o.group_ranks) as bigint) as groups,
    cast(sum(o.collectives) as bigint) as collectives,
    cast(sum(o.payload_bytes) as bigint) as payload_bytes,
    cast(sum(o.padding_bytes) as bigint) as padding_bytes,
    -- wire_share is what all ranks send together; of gather and scatter group_size times as much
    cast(sum(cast(o.wire_share as decimal(38, 0))) as double)
        / case when o.op in ('gather', 'scatter') then greatest(o.group_size, 1) else 1 end
        / {world_size} as wire_bytes,
    case when sum(o.unexecuted) = 0 then cast(sum(cast(o.executed_share as decimal(38, 0))) as double)
        / case when o.op in ('gather', 'scatter') then greatest(o.group_size, 1) else 1 end
        / {world_size} end as executed_wire_bytes,
    case when sum(o.unlocated) = 0 then cast(sum(cast(o.between_share as decimal(38, 0))) as double)
        / case when o.op in ('gather', 'scatter') then greatest(o.group_size, 1) else 1 end
        / {world_size} end as between_hosts_bytes
from operations o
join whole w on w.attempt = o.attempt and w.step = o.step
where o.op <> 'barrier'
group by o.attempt, o.step, o.op, o.intended_op, o.purpose, o.group_desc, o.group_size
having sum(o.collectives) > 0
order by o.attempt, o.step, o.op, o.intended_op, o.purpose, o.group_desc, o.group_size
