-- What the records of each rank know of their times, for each combination of the grouping columns.
--
-- Input: collectives
-- Put in: the columns to group by, each followed by a comma. Sums of these sums are those of fewer columns.
select
    {by}
    rank as member,
    count(*) as records,
    count(exposed_ns) as timed,
    count(device_end_ns) as sampled,
    cast(sum(case when exposed_ns is null and is_async and wait_end_ns is null then 1 else 0 end) as bigint) as unwaited,
    cast(sum(
        case
            when device_end_ns is not null then 1
            when wait_end_ns is not null and (device is null or device = 'cpu') then 1
            else 0
        end
    ) as bigint) as ended,
    cast(sum(coalesce(exposed_ns, 0)) as decimal(38, 0)) as summed_ns
from collectives
group by {by} rank
