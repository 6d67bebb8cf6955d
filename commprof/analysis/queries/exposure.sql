-- Exposed and overlapped communication for each combination of the grouping columns.
--
-- Input:  stall_times (see stalls.py, grouped by the same columns), counts (see exposure_counts.sql, by these columns
--         at least; without the column member it may be that of several hosts), participating (see exposure_ranks.sql), steps
-- Times are means over the ranks that have part in the combination, whatever the step; a step takes as long as its slowest
-- rank. exposed_share is the part of the training steps that ended, so what lies outside of them counts in exposed_ns and not
-- in the share. exposed_ns and overlapped_ns are null where only bounds of them are known.
-- Put in: the columns to group by, each followed by a comma: all, those without step, and those that durations differ by;
-- and the clauses that group, join and order by them.
with durations as (
    select attempt, step, {per_rank} max(end_ns - begin_ns - coalesce(outside_ns, 0)) as step_ns
    from steps
    where step >= 0
    group by {per_rank} attempt, step
    having count(end_ns) = count(*)
),
lasting as (
    select {of_duration} sum(step_ns) as step_ns
    from durations
    {group_by_duration}
),
joined as (
    select
        {by}
        0 as records,
        0 as timed,
        0 as sampled,
        0 as unwaited,
        0 as bounded,
        0 as ended,
        0 as unsampled,
        0 as summed_ns,
        exposed_ns,
        low_ns,
        high_ns,
        overlapped_ns,
        case when exists_ns is null then 0 else exposed_ns end as inside_ns
    from (
        select s.*, d.step_ns as exists_ns
        from stall_times s
        left join durations d on d.attempt = s.attempt and d.step = s.step {and_rank}
    ) x
    union all
    select
        {by}
        records,
        timed,
        sampled,
        unwaited,
        bounded,
        ended,
        unsampled,
        summed_ns,
        0 as exposed_ns,
        0 as low_ns,
        0 as high_ns,
        0 as overlapped_ns,
        0 as inside_ns
    from counts
),
summed as (
    select
        {by}
        sum(records) as records,
        sum(timed) as timed,
        sum(sampled) as sampled,
        sum(unwaited) as unwaited,
        sum(bounded) as bounded,
        sum(ended) as ended,
        sum(unsampled) as unsampled,
        sum(summed_ns) as summed_ns,
        sum(exposed_ns) as exposed_ns,
        sum(low_ns) as low_ns,
        sum(high_ns) as high_ns,
        sum(overlapped_ns) as overlapped_ns,
        sum(inside_ns) as inside_ns
    from joined
    {group_by}
),
sized as (
    select s.*, p.ranks
    from summed s
    left join participating p on {same_partition}
),
complete as (
    select
        s.*,
        s.timed > 0 or s.exposed_ns > 0 or s.bounded > 0 or s.high_ns > 0 as is_known,
        s.bounded > 0 or s.high_ns > 0 as has_bounds,
        (s.ended > 0 or s.overlapped_ns > 0) and s.ended >= s.records as all_end,
        sum(unsampled) over (partition by {partition} 1) = 0 as all_sampled -- what began in a step may run on in the next
    from sized s
)
select
    {of_row}
    cast(c.ranks as bigint) as ranks,
    cast(c.records as bigint) as records,
    cast(c.timed as bigint) as timed,
    cast(c.sampled as bigint) as sampled,
    cast(c.unwaited as bigint) as unwaited,
    cast(c.bounded as bigint) as bounded,
    case
        when c.is_known and not c.has_bounds then cast(round(cast(c.exposed_ns as double) / c.ranks) as bigint)
    end as exposed_ns,
    case
        when c.is_known then cast(round(cast(c.exposed_ns + c.low_ns as double) / c.ranks) as bigint)
    end as exposed_low_ns,
    case
        when c.is_known and c.timed + c.bounded >= c.records
        then cast(round(cast(c.exposed_ns + c.high_ns as double) / c.ranks) as bigint)
    end as exposed_high_ns,
    case when c.timed > 0 then cast(round(cast(c.summed_ns as double) / c.ranks) as bigint) end as summed_ns,
    case
        when c.all_end and (c.all_sampled or c.overlapped_ns = 0)
        then cast(round(cast(c.overlapped_ns as double) / c.ranks) as bigint)
    end as overlapped_ns,
    case
        when c.all_end then cast(round(cast(c.overlapped_ns as double) / c.ranks) as bigint)
    end as overlapped_at_most_ns,
    cast(round(l.step_ns) as bigint) as step_ns,
    case
        when l.step_ns > 0 and c.is_known and not c.has_bounds
        then cast(c.inside_ns as double) / c.ranks / l.step_ns
    end as exposed_share
from complete c
left join lasting l on {on_duration}
{order_by}
