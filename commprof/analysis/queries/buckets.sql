-- The gradient buckets of a run, each once, whatever the number of ranks that flushed it.
--
-- Input:  described (see commprof.analysis.bucket_contents), members (see commprof.analysis.bucket_groups), collectives
-- Output: one row per attempt, step, micro-batch, bucket and group of ranks that reduce it; what it holds is taken from the
--         lowest rank of the group.
-- It takes, on each rank, from the first of its collectives until the last end that is known: the return of the call, the end
-- of a wait, or what the device says. That, and what stood still for it, are means over the ranks.
with travelling as (
    select
        c.attempt,
        c.step,
        c.micro_step,
        c.bucket,
        c.rank,
        m.group_number,
        max(
            greatest(
                issue_ns, coalesce(return_ns, issue_ns), coalesce(wait_end_ns, issue_ns), coalesce(device_end_ns, issue_ns)
            )
        ) - min(issue_ns) as duration_ns,
        sum(exposed_ns) as exposed_ns
    from collectives c
    join members m on m.attempt = c.attempt and m.rank = c.rank
    where c.bucket is not null and c.purpose = 'gradient_reduce'
    group by c.attempt, c.step, c.micro_step, c.bucket, c.rank, m.group_number
),
travelled as (
    select
        attempt,
        step,
        micro_step,
        bucket,
        group_number,
        cast(round(avg(duration_ns)) as bigint) as duration_ns,
        cast(round(avg(exposed_ns)) as bigint) as exposed_ns
    from travelling
    group by attempt, step, micro_step, bucket, group_number
)
select
    d.attempt,
    d.step,
    d.micro_step,
    d.bucket,
    d.group_number,
    d.group_ranks,
    d.numel,
    d.bytes,
    d.capacity,
    cast(d.numel as double) / nullif(d.capacity, 0) as fill,
    d.dtype,
    d.owners,
    d.parameters,
    d.flush_reason,
    d.ranks,
    d.alike,
    d.time_ns,
    t.duration_ns,
    t.exposed_ns
from described d
left join travelled t
    on t.attempt = d.attempt and t.step = d.step and t.micro_step = d.micro_step and t.bucket = d.bucket
    and t.group_number = d.group_number
order by d.attempt, d.step, d.micro_step, d.bucket, d.group_number
