-- How long it took to reduce each gradient bucket.
--
-- grain: one row per attempt, step, micro_step, bucket and group of ranks that reduce it, for
--   buckets that records name
-- inputs: collectives, bucket_groups
-- On each rank, the duration lasts from the first collective of the bucket to the last known end: the
-- return of the call, the end of a wait, or the end on the device. Duration and exposed time are means
-- over ranks.
with of_rank as (
    select
        c.attempt,
        c.step,
        c.micro_step,
        c.bucket,
        c.rank,
        g.group_ranks,
        max(greatest(
            c.issue_ns,
            coalesce(c.return_ns, c.issue_ns),
            coalesce(c.wait_end_ns, c.issue_ns),
            coalesce(c.device_end_ns, c.issue_ns)
        )) - min(c.issue_ns) as duration_ns,
        sum(c.exposed_ns) as exposed_ns
    from collectives c
    join bucket_groups g on g.attempt = c.attempt and g.rank = c.rank
    where c.bucket is not null and c.purpose = 'gradient_reduce'
    group by c.attempt, c.step, c.micro_step, c.bucket, c.rank, g.group_ranks
)
select
    attempt,
    step,
    micro_step,
    bucket,
    group_ranks,
    cast(round(avg(cast(duration_ns as double))) as bigint) as duration_ns,
    cast(round(avg(cast(exposed_ns as double))) as bigint) as exposed_ns
from of_rank
group by attempt, step, micro_step, bucket, group_ranks
