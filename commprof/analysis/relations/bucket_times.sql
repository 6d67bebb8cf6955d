-- The time that was needed to reduce each gradient bucket.
--
-- grain: one row per attempt, step, micro_step, bucket and group of ranks that reduce the bucket, for
--   buckets whose number occurs in a record
-- inputs: collectives, bucket_groups
-- Only records with the purpose gradient_reduce count.
-- On each rank, the duration of a bucket begins with its first collective. The duration ends with
-- the latest end that is known: the return of a call, the end of a wait, or the end on the device.
-- The duration and the exposed time are means over the ranks.
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
