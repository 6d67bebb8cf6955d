-- Gradient buckets, together with the operations that reduced each bucket. All ranks that reduce a
-- bucket together share one row.
--
-- grain: one row per attempt, step, micro_step, bucket and group of ranks that reduce the bucket
-- inputs: bucket_groups, bucket_contents, bucket_times, operations, aggregates
-- requested: attempt, step, micro_step, bucket, op, intended_op, purpose, group_ranks, group_size
-- The column fill is numel divided by capacity. The columns op and intended_op contain the names of
-- all operations that reduced the bucket, joined by ', '. The column between_hosts_bytes is the
-- part of wire_bytes that was sent by operations whose span is between_hosts. The columns
-- wire_bytes, executed_wire_bytes and between_hosts_bytes are means over all ranks that reduce the
-- bucket. The columns executed_wire_bytes and between_hosts_bytes are null if these bytes are not
-- known. The column padding_bytes is null if no runtime reports padding. The columns duration_ns
-- and exposed_ns are null if no record contains the number of the bucket. Some steps are recorded
-- as sums (--aggregate, --max-size). For these steps, the column collectives and all columns of
-- bytes are null, because sums do not contain bucket numbers.
with sizes as (
    select attempt, group_ranks, count(*) as members
    from bucket_groups
    group by attempt, group_ranks
),
reducing as (
    select
        o.attempt,
        o.step,
        o.micro_step,
        o.bucket,
        g.group_ranks,
        o.op,
        o.intended_op,
        o.collectives,
        o.payload_bytes,
        o.padding_bytes,
        o.unexecuted,
        o.unlocated,
        cast(o.wire_share as double) / o.wire_ranks
            * case when o.op = 'send' then 1 else o.group_size end / s.members as wire_bytes,
        cast(o.executed_share as double) / o.wire_ranks
            * case when o.op = 'send' then 1 else o.group_size end / s.members as executed_wire_bytes,
        cast(o.between_share as double) / o.wire_ranks
            * case when o.op = 'send' then 1 else o.group_size end / s.members as between_hosts_bytes
    from operations o
    join bucket_groups g
        on g.attempt = o.attempt
        and g.rank = cast(split_part(split_part(o.group_ranks, ',', 1), '-', 1) as int)
    join sizes s on s.attempt = g.attempt and s.group_ranks = g.group_ranks
    where o.bucket is not null and o.purpose = 'gradient_reduce'
),
sent as (
    select
        attempt,
        step,
        micro_step,
        bucket,
        group_ranks,
        nullif(concat_ws(
            ', ',
            max(case when op = 'all_gather' then op end),
            max(case when op = 'all_reduce' then op end),
            max(case when op = 'all_to_all' then op end),
            max(case when op = 'barrier' then op end),
            max(case when op = 'broadcast' then op end),
            max(case when op = 'gather' then op end),
            max(case when op = 'recv' then op end),
            max(case when op = 'reduce' then op end),
            max(case when op = 'reduce_scatter' then op end),
            max(case when op = 'scatter' then op end),
            max(case when op = 'send' then op end)
        ), '') as op,
        nullif(concat_ws(
            ', ',
            max(case when intended_op = 'all_gather' then intended_op end),
            max(case when intended_op = 'all_reduce' then intended_op end),
            max(case when intended_op = 'all_to_all' then intended_op end),
            max(case when intended_op = 'barrier' then intended_op end),
            max(case when intended_op = 'broadcast' then intended_op end),
            max(case when intended_op = 'gather' then intended_op end),
            max(case when intended_op = 'recv' then intended_op end),
            max(case when intended_op = 'reduce' then intended_op end),
            max(case when intended_op = 'reduce_scatter' then intended_op end),
            max(case when intended_op = 'scatter' then intended_op end),
            max(case when intended_op = 'send' then intended_op end)
        ), '') as intended_op,
        cast(sum(collectives) as bigint) as collectives,
        cast(sum(payload_bytes) as bigint) as payload_bytes,
        cast(sum(padding_bytes) as bigint) as padding_bytes,
        sum(wire_bytes) as wire_bytes,
        case when sum(unexecuted) = 0 then sum(executed_wire_bytes) end as executed_wire_bytes,
        case when sum(unlocated) = 0 then sum(between_hosts_bytes) end as between_hosts_bytes
    from reducing
    group by attempt, step, micro_step, bucket, group_ranks
),
summed as (
    select attempt, step
    from aggregates
    where step >= 0
    group by attempt, step
)
select
    c.attempt,
    c.step,
    c.micro_step,
    c.bucket,
    c.group_ranks,
    c.numel,
    c.bytes,
    c.capacity,
    cast(c.numel as double) / nullif(c.capacity, 0) as fill,
    c.dtype,
    c.owners,
    c.parameters,
    c.flush_reason,
    c.ranks,
    c.alike,
    c.time_ns,
    s.op,
    s.intended_op,
    case when m.step is null then coalesce(s.collectives, 0) end as collectives,
    case when m.step is null then coalesce(s.payload_bytes, 0) end as payload_bytes,
    case when m.step is null then s.padding_bytes end as padding_bytes,
    case when m.step is null then coalesce(s.wire_bytes, 0.0) end as wire_bytes,
    case when m.step is not null then null when s.attempt is null then 0.0 else s.executed_wire_bytes end as executed_wire_bytes,
    case when m.step is not null then null when s.attempt is null then 0.0 else s.between_hosts_bytes end as between_hosts_bytes,
    t.duration_ns,
    t.exposed_ns
from bucket_contents c
left join sent s
    on s.attempt = c.attempt
    and s.step = c.step
    and s.micro_step = c.micro_step
    and s.bucket = c.bucket
    and s.group_ranks = c.group_ranks
left join bucket_times t
    on t.attempt = c.attempt
    and t.step = c.step
    and t.micro_step = c.micro_step
    and t.bucket = c.bucket
    and t.group_ranks = c.group_ranks
left join summed m on m.attempt = c.attempt and m.step = c.step
