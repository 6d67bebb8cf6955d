-- For how long the program of each rank stood still for collectives, and for how long they ran beside it, by step.
--
-- Input:  collectives, steps
-- Output: one row per process, step and combination of the columns to group by: exposed_ns, overlapped_ns.
--         step is -1 before the first step, null after the last and between steps.
--
-- A collective that the program stood still for, did so until wait_end_ns, on a device until device_end_ns, for exposed_ns.
-- It runs from issue_ns (device_begin_ns) until its end: device_end_ns where that is known, else wait_end_ns.
-- The moments at which any of this begins or ends, and those at which steps do, cut the time of a process into pieces. A
-- piece in which at least one collective holds the program counts as exposed, once; one in which collectives only run as
-- overlapped. So two threads that wait at the same time count once, and what was issued in one step and waited for in the
-- next counts where the time was spent.
-- The columns to group by are put in: each followed by a comma.
with spans as (
    select
        {by}
        attempt,
        rank,
        pid,
        exposed_ns,
        case when device is null or device = 'cpu' then wait_end_ns else device_end_ns end as until_ns,
        case when device is null or device = 'cpu' then issue_ns else device_begin_ns end as begin_ns,
        case
            when device is null or device = 'cpu' then
                case
                    when device_end_ns is null then wait_end_ns
                    when wait_end_ns is null then device_end_ns
                    when device_end_ns < wait_end_ns then device_end_ns
                    else wait_end_ns
                end
            else device_end_ns
        end as end_ns
    from collectives
),
-- 2 t + 1: a step begins at t. 2 t: one ends at t. The greater of two at one moment is what holds from then on.
marks as (
    select attempt, rank, pid, begin_ns as time_ns, 2 * begin_ns + 1 as mark from steps where step >= 0
    union all
    select attempt, rank, pid, end_ns as time_ns, 2 * end_ns as mark from steps where step >= 0 and end_ns is not null
),
edges as (
    select {by} attempt, rank, pid, until_ns - exposed_ns as time_ns, 1 as holding, 0 as running
    from spans
    where exposed_ns > 0 and until_ns is not null
    union all
    select {by} attempt, rank, pid, until_ns as time_ns, -1 as holding, 0 as running
    from spans
    where exposed_ns > 0 and until_ns is not null
    union all
    select {by} attempt, rank, pid, begin_ns as time_ns, 0 as holding, 1 as running
    from spans
    where end_ns > begin_ns
    union all
    select {by} attempt, rank, pid, end_ns as time_ns, 0 as holding, -1 as running
    from spans
    where end_ns > begin_ns
),
extents as (
    select {by} attempt, rank, pid, min(time_ns) as first_ns, max(time_ns) as last_ns
    from edges
    group by {by} attempt, rank, pid
),
beginnings as (
    select
        attempt,
        rank,
        pid,
        time_ns,
        max(mark) over (
            partition by attempt, rank, pid order by time_ns range between unbounded preceding and current row
        ) as mark
    from (
        select distinct attempt, rank, pid, first_ns as time_ns, cast(null as bigint) as mark from extents
        union all
        select attempt, rank, pid, time_ns, mark from marks
    ) b
),
changes as (
    select {by} attempt, rank, pid, time_ns, holding, running, cast(null as bigint) as mark from edges
    union all
    select {of_extent} e.attempt, e.rank, e.pid, e.first_ns as time_ns, 0 as holding, 0 as running, b.mark
    from extents e
    join beginnings b on b.attempt = e.attempt and b.rank = e.rank and b.pid = e.pid and b.time_ns = e.first_ns
    union all
    select {of_extent} e.attempt, e.rank, e.pid, m.time_ns, 0 as holding, 0 as running, m.mark
    from extents e
    join marks m
        on m.attempt = e.attempt and m.rank = e.rank and m.pid = e.pid
        and m.time_ns > e.first_ns and m.time_ns < e.last_ns
),
moments as (
    select
        {by}
        attempt,
        rank,
        pid,
        time_ns,
        sum(holding) as holding,
        sum(running) as running,
        max(mark) as mark
    from changes
    group by {by} attempt, rank, pid, time_ns
),
pieces as (
    select
        {by}
        attempt,
        rank,
        pid,
        sum(holding) over (
            partition by {by} attempt, rank, pid order by time_ns rows between unbounded preceding and current row
        ) as holding,
        sum(running) over (
            partition by {by} attempt, rank, pid order by time_ns rows between unbounded preceding and current row
        ) as running,
        max(mark) over (
            partition by {by} attempt, rank, pid order by time_ns rows between unbounded preceding and current row
        ) as mark,
        lead(time_ns) over (partition by {by} attempt, rank, pid order by time_ns) - time_ns as length_ns
    from moments
)
select
    {of_piece}
    p.attempt,
    p.rank,
    p.pid,
    case when p.mark is null then -1 else s.step end as step,
    cast(sum(case when p.holding > 0 then p.length_ns else 0 end) as bigint) as exposed_ns,
    cast(sum(case when p.holding = 0 then p.length_ns else 0 end) as bigint) as overlapped_ns
from pieces p
left join steps s
    on s.attempt = p.attempt and s.rank = p.rank and s.pid = p.pid and s.step >= 0 and 2 * s.begin_ns + 1 = p.mark
where p.holding > 0 or p.running > 0
group by {of_piece} p.attempt, p.rank, p.pid, case when p.mark is null then -1 else s.step end
