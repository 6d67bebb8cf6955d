-- What the records of each rank know of their times, for each combination of the grouping columns.
--
-- Input: collectives, stalls
-- Put in: the columns to group by, each followed by a comma, and them of table c. Sums of these sums are those of fewer columns.
-- bounded: no wait was seen, but C++ waited for it in an interval of stalls (see stalls.py); it has ended by the end of that.
with counted as (
    select
        {by}
        rank as member,
        count(*) as records,
        count(exposed_ns) as timed,
        count(device_end_ns) as sampled,
        sum(case when exposed_ns is null and is_async and wait_end_ns is null then 1 else 0 end) as unwaited,
        0 as bounded,
        sum(case
            when device_end_ns is not null then 1
            when wait_end_ns is not null and (device is null or device = 'cpu') then 1
            else 0
        end) as ended,
        sum(case
            when is_async and (device_end_ns is null or (device is not null and device <> 'cpu')) then 1 else 0
        end) as unsampled,
        sum(coalesce(exposed_ns, 0)) as summed_ns
    from collectives
    group by {by} rank
    union all
    select
        {of_row}
        c.rank as member,
        0 as records,
        0 as timed,
        0 as sampled,
        0 as unwaited,
        count(*) as bounded,
        sum(case when c.device_end_ns is null then 1 else 0 end) as ended,
        0 as unsampled,
        0 as summed_ns
    from (
        select *, device is not null and device <> 'cpu' as on_device
        from collectives
        where exposed_ns is null and is_async and wait_end_ns is null
            and (layer = 'c10d' or purpose = 'gradient_reduce') and (select count(*) from stalls) > 0
    ) c
    asof join (select *, device_end_ns is not null as on_device from stalls) s
        on s.attempt = c.attempt and s.rank = c.rank and s.pid = c.pid and s.on_device = c.on_device
            and c.issue_ns <= s.end_ns
    where c.issue_ns >= s.since_ns
    group by {of_row} c.rank
)
select
    {by}
    member,
    cast(sum(records) as bigint) as records,
    cast(sum(timed) as bigint) as timed,
    cast(sum(sampled) as bigint) as sampled,
    cast(sum(unwaited) as bigint) as unwaited,
    cast(sum(bounded) as bigint) as bounded,
    cast(sum(ended) as bigint) as ended,
    cast(sum(unsampled) as bigint) as unsampled,
    cast(sum(summed_ns) as decimal(38, 0)) as summed_ns
from counted
group by {by} member
