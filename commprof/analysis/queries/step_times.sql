-- One row per training step and attempt.
--
-- Input: step_sums (the relation), operations (sums of operations.sql by attempt, step and op), exposure (see exposure.sql, by attempt and step)
-- Begin and end are those of the lowest rank, since hosts do not share a clock; durations are compared, never moments.
with of_step as (
    select
        attempt,
        step,
        sum(ranks) as ranks,
        max_by(begin_ns, -rank) as begin_ns,
        max_by(last_ns, -rank) as last_ns,
        case when sum(ended) = sum(processes) then max(longest_ns) end as duration_ns,
        max(micro_steps) as micro_steps,
        sum(loss) / nullif(sum(losses), 0) as loss,
        sum(grad_norm) / nullif(sum(grad_norms), 0) as grad_norm,
        max(loss_scale) as loss_scale,
        cast(sum(samples) as bigint) as samples,
        cast(sum(cpu_ns) as double) / nullif(sum(cpus), 0) as cpu_ns,
        max(rss_bytes) as rss_bytes,
        max(device_bytes) as device_bytes
    from step_sums
    group by attempt, step
),
sent as (
    select
        attempt,
        step,
        sum(collectives) as collectives,
        sum(payload_bytes) as payload_bytes,
        sum(padding_bytes) as padding_bytes,
        sum(wire_bytes) as wire_bytes,
        case when sum(unlocated) = 0 then sum(between_hosts_bytes) end as between_hosts_bytes
    from (
        select
            attempt,
            step,
            sum(collectives) as collectives,
            sum(payload_bytes) as payload_bytes,
            sum(padding_bytes) as padding_bytes,
            cast(sum(cast(wire_share as decimal(38, 0))) as double) / wire_ranks as wire_bytes,
            cast(sum(cast(between_share as decimal(38, 0))) as double) / wire_ranks as between_hosts_bytes,
            sum(unlocated) as unlocated
        from operations
        where step >= 0 and op <> 'barrier'
        group by attempt, step, wire_ranks
    ) of_size
    group by attempt, step
)
select
    s.attempt,
    s.step,
    cast(s.ranks as int) as ranks,
    s.begin_ns,
    case when s.last_ns >= 0 then s.last_ns end as end_ns,
    s.duration_ns,
    s.micro_steps,
    s.loss,
    s.grad_norm,
    s.loss_scale,
    s.samples,
    cast(coalesce(t.collectives, 0) as bigint) as collectives,
    cast(coalesce(t.payload_bytes, 0) as bigint) as payload_bytes,
    cast(t.padding_bytes as bigint) as padding_bytes,
    coalesce(t.wire_bytes, 0.0) as wire_bytes,
    case when t.step is null then 0.0 else t.between_hosts_bytes end as between_hosts_bytes,
    case when w.step is null and t.step is null then 0 else w.exposed_ns end as exposed_ns,
    case when w.step is null and t.step is null then 0 else w.exposed_low_ns end as exposed_low_ns,
    case when w.step is null and t.step is null then 0 else w.exposed_high_ns end as exposed_high_ns,
    cast(round(s.cpu_ns) as bigint) as cpu_ns,
    s.rss_bytes,
    s.device_bytes
from of_step s
left join sent t on t.attempt = s.attempt and t.step = s.step
left join exposure w on w.attempt = s.attempt and w.step = s.step
order by s.attempt, s.step
