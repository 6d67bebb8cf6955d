-- For how long the program of each rank stood still for collectives, and for how long they ran beside it, by step.
--
-- Input:  collectives, steps
-- Output: one row per process, step and combination of the columns to group by: exposed_ns, overlapped_ns.
--         step is -1 before the first step, null after the last and between steps.
--
-- A collective that the program stood still for held it until wait_end_ns, on a device until device_end_ns, for exposed_ns.
-- It ran from issue_ns (device_begin_ns) until its end: device_end_ns where that is known, else wait_end_ns.
-- Exposed is the length of the union of the times in which any held the program, overlapped that of the union of all times
-- in which any held it or ran, less the former. So two threads that wait at the same time count once, and what was issued in
-- one step and waited for in the next counts where the time was spent.
-- The columns to group by are put in: each followed by a comma.
with known as (
    select
        {by}
        attempt,
        rank,
        pid,
        step,
        case
            when exposed_ns <= 0 then null
            when device is null or device = 'cpu' then wait_end_ns
            else device_end_ns
        end as held_until_ns,
        exposed_ns,
        case when device is null or device = 'cpu' then issue_ns else device_begin_ns end as ran_from_ns,
        case
            when device is not null and device <> 'cpu' then device_end_ns
            when device_end_ns is null then wait_end_ns
            when wait_end_ns is null or device_end_ns < wait_end_ns then device_end_ns
            else wait_end_ns
        end as ran_until_ns
    from collectives
),
spans as (
    select k.*, held_until_ns - exposed_ns as held_from_ns, coalesce(ran_until_ns > ran_from_ns, false) as has_run
    from known k
),
-- kind 0: it held the program; kind 1: it held it or ran. What lies within the other one of a record is left out of kind 1.
intervals as (
    select {by} attempt, rank, pid, step, 0 as kind, held_from_ns as start_ns, held_until_ns as stop_ns
    from spans
    where held_from_ns is not null
    union all
    select {by} attempt, rank, pid, step, 1 as kind, ran_from_ns as start_ns, ran_until_ns as stop_ns
    from spans
    where has_run and (held_from_ns is null or ran_from_ns < held_from_ns or ran_until_ns > held_until_ns)
    union all
    select {by} attempt, rank, pid, step, 1 as kind, held_from_ns as start_ns, held_until_ns as stop_ns
    from spans
    where held_from_ns is not null
        and not (
            has_run and ran_from_ns <= held_from_ns and ran_until_ns >= held_until_ns
            and (ran_from_ns < held_from_ns or ran_until_ns > held_until_ns)
        )
),
covered as (
    select
        i.*,
        max(stop_ns) over (
            partition by kind, {by} attempt, rank, pid
            order by start_ns, stop_ns
            rows between unbounded preceding and 1 preceding
        ) as before_ns
    from intervals i
),
-- What each interval adds to the union of the earlier ones. No two of a kind lie over each other.
pieces as (
    select
        {by}
        attempt,
        rank,
        pid,
        step,
        kind,
        case when before_ns > start_ns then before_ns else start_ns end as start_ns,
        stop_ns
    from covered
    where before_ns is null or stop_ns > before_ns
),
-- Nearly all lie in the step that they were issued in.
placed as (
    select p.*, s.step as inside
    from pieces p
    left join steps s
        on s.attempt = p.attempt and s.rank = p.rank and s.pid = p.pid and s.step = p.step and s.step >= 0
        and p.start_ns >= s.begin_ns and (s.end_ns is null or p.stop_ns <= s.end_ns)
),
-- The others are cut where steps begin and end. 2 t + 1: a step begins at t; 2 t: one ends there. The greater of two at one
-- moment is what holds from then on.
marks as (
    select attempt, rank, pid, begin_ns as time_ns, 2 * begin_ns + 1 as mark from steps where step >= 0
    union all
    select attempt, rank, pid, end_ns as time_ns, 2 * end_ns as mark from steps where step >= 0 and end_ns is not null
),
edges as (
    select {by} attempt, rank, pid, kind, start_ns as time_ns, 1 as opens from placed where inside is null
    union all
    select {by} attempt, rank, pid, kind, stop_ns as time_ns, -1 as opens from placed where inside is null
),
extents as (
    select {by} attempt, rank, pid, kind, min(time_ns) as first_ns, max(time_ns) as last_ns
    from edges
    group by {by} attempt, rank, pid, kind
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
    select {by} attempt, rank, pid, kind, time_ns, opens, cast(null as bigint) as mark from edges
    union all
    select {of_extent} e.attempt, e.rank, e.pid, e.kind, e.first_ns as time_ns, 0 as opens, b.mark
    from extents e
    join beginnings b on b.attempt = e.attempt and b.rank = e.rank and b.pid = e.pid and b.time_ns = e.first_ns
    union all
    select {of_extent} e.attempt, e.rank, e.pid, e.kind, m.time_ns, 0 as opens, m.mark
    from extents e
    join marks m
        on m.attempt = e.attempt and m.rank = e.rank and m.pid = e.pid
        and m.time_ns > e.first_ns and m.time_ns < e.last_ns
),
moments as (
    select {by} attempt, rank, pid, kind, time_ns, sum(opens) as opens, max(mark) as mark
    from changes
    group by {by} attempt, rank, pid, kind, time_ns
),
cut as (
    select
        {by}
        attempt,
        rank,
        pid,
        kind,
        sum(opens) over (
            partition by {by} attempt, rank, pid, kind
            order by time_ns rows between unbounded preceding and current row
        ) as is_open,
        max(mark) over (
            partition by {by} attempt, rank, pid, kind
            order by time_ns rows between unbounded preceding and current row
        ) as mark,
        lead(time_ns) over (partition by {by} attempt, rank, pid, kind order by time_ns) - time_ns as length_ns
    from moments
),
lengths as (
    select {by} attempt, rank, pid, kind, inside as step, stop_ns - start_ns as length_ns
    from placed
    where inside is not null
    union all
    select {of_cut} c.attempt, c.rank, c.pid, c.kind, case when c.mark is null then -1 else s.step end as step, c.length_ns
    from cut c
    left join steps s
        on s.attempt = c.attempt and s.rank = c.rank and s.pid = c.pid and s.step >= 0 and 2 * s.begin_ns + 1 = c.mark
    where c.is_open > 0
)
select
    {by}
    attempt,
    rank,
    pid,
    step,
    cast(sum(case when kind = 0 then length_ns else 0 end) as bigint) as exposed_ns,
    cast(sum(case when kind = 0 then -length_ns else length_ns end) as bigint) as overlapped_ns
from lengths
group by {by} attempt, rank, pid, step
