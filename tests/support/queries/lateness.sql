-- How late each rank comes after the first one: quantiles over the collectives of several ranks that can be compared.
--
-- Input: arrivals (see commprof.align.ranks.rank_arrivals)
select
    rank,
    count(*) as collectives,
    percentile_cont(0.05) within group (order by lateness_ns) as p5_ns,
    percentile_cont(0.25) within group (order by lateness_ns) as p25_ns,
    percentile_cont(0.5) within group (order by lateness_ns) as median_ns,
    percentile_cont(0.75) within group (order by lateness_ns) as p75_ns,
    percentile_cont(0.95) within group (order by lateness_ns) as p95_ns,
    max(lateness_ns) as highest_ns,
    median(lateness_error_ns) as error_ns
from arrivals
where members > 1 and lateness_ns is not null
group by rank
order by rank
