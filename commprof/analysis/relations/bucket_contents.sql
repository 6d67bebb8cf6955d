-- The contents of each gradient bucket, from the lowest rank that reported them.
--
-- grain: one row per attempt, step, micro_step, bucket and group of ranks that reduce the bucket
-- inputs: buckets, bucket_groups
-- The column group_ranks is null for ranks that have no record with a bucket. The column ranks
-- counts the ranks that flushed the bucket. The column alike is true if the bucket has the same
-- number of elements and the same parameters on all of these ranks.
with placed as (
    select *, cast(rank as bigint) * 4294967296 + pid as place -- the order of the processes
    from buckets
)
select
    b.attempt,
    b.step,
    b.micro_step,
    b.bucket,
    g.group_ranks,
    min_by(b.numel, b.place) as numel,
    min_by(b.bytes, b.place) as bytes,
    min_by(b.capacity, case when b.capacity is not null then b.place end) as capacity,
    min_by(b.dtype, b.place) as dtype,
    min_by(b.owners, case when b.owners is not null then b.place end) as owners,
    min_by(b.parameters, case when b.parameters is not null then b.place end) as parameters,
    min_by(b.flush_reason, case when b.flush_reason is not null then b.place end) as flush_reason,
    count(*) as ranks,
    min(b.numel) = max(b.numel) and coalesce(min(b.parameters) = max(b.parameters), true) as alike,
    min_by(b.time_ns, b.place) as time_ns
from placed b
left join bucket_groups g on g.attempt = b.attempt and g.rank = b.rank
group by b.attempt, b.step, b.micro_step, b.bucket, g.group_ranks
