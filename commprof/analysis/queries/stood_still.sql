-- For how long the processes of each step stood still for collectives together, and how many records say so.
--
-- Input: standstill (see standstill.py, grouped by nothing), counts (see exposure_counts.sql)
select
    attempt,
    step,
    cast(sum(exposed_ns) as bigint) as exposed_ns,
    cast(sum(timed) as bigint) as timed
from (
    select attempt, step, exposed_ns, 0 as timed from standstill where step >= 0
    union all
    select attempt, step, 0 as exposed_ns, sum(timed) as timed
    from counts
    where step >= 0
    group by attempt, step
) w
group by attempt, step
