-- What each rank waited for, where that is beyond the error of the clocks, and how many of its collectives can be compared.
--
-- Input: arrivals (see commprof.align.ranks.rank_arrivals)
-- Output: one row per rank and cause that it has, and one without a cause for the rest.
select
    rank,
    cause,
    count(*) as collectives,
    cast(coalesce(sum(
        case
            when cause = 'late_arrival' then waiting_ns
            when cause = 'late_launch' then launch_ns
            when cause = 'slow_transfer' then transfer_ns
        end
    ), 0) as bigint) as time_ns
from arrivals
where members > 1 and lateness_ns is not null
group by rank, cause
