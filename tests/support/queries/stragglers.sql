-- How often each rank was the last to come, and what the others waited for it.
--
-- Input: arrivals (see commprof.align.ranks.rank_arrivals)
-- Only collectives in which every rank waits for every other, recorded by all of them. Of a broadcast the root waits for
-- nobody, and who sends late need not be the one who is slow: messages are left out.
-- A rank stands out when it was last in half as many collectives again as it would be if all ranks were alike, and in more
-- than chance explains (three standard deviations).
with counted as (
    select *
    from arrivals
    where is_last is not null
        and op in ('all_reduce', 'reduce_scatter', 'all_gather', 'all_to_all', 'barrier')
),
steps as (
    select count(*) as steps
    from (select distinct attempt, step from counted where step >= 0) s
),
ranked as (
    select
        rank,
        count(*) as collectives,
        count(case when is_last and certain then 1 end) as last,
        count(case when is_last and not certain then 1 end) as within_bound,
        sum(cast(1 as double) / members) as expected_last,
        sum(cast(members - 1 as double) / members / members) as expected_variance,
        cast(round(avg(lateness_ns)) as bigint) as mean_lateness_ns,
        cast(round(median(lateness_ns)) as bigint) as median_lateness_ns,
        cast(round(median(error_ns)) as bigint) as error_ns,
        cast(coalesce(sum(case when is_last and certain then lead_ns end), 0) as bigint) as lead_ns,
        -- Null where no wait of the others was seen; a rank that was never last kept nobody waiting.
        cast(
            case
                when count(case when is_last and certain then 1 end) = 0 then 0
                else sum(case when is_last and certain then others_waited_ns end)
            end as bigint
        ) as others_waited_ns,
        cast(
            round(
                case
                    when count(case when is_last and certain and step >= 0 then 1 end) = 0 then 0
                    else sum(case when is_last and certain and step >= 0 then others_waited_ns end)
                end / nullif(max(s.steps), 0)
            ) as bigint
        ) as others_waited_per_step_ns,
        cast(
            case
                when count(case when is_last and certain then 1 end) = 0 then 0
                else sum(case when is_last and certain then others_waited_own_ns end)
            end as bigint
        ) as others_waited_own_ns,
        cast(
            case
                when count(case when is_last and certain then 1 end) = 0 then 0
                else sum(
                    case
                        when is_last and certain and others_waited_own_ns is not null
                            then others_waited_ns - others_waited_own_ns
                    end
                )
            end as bigint
        ) as others_waited_inherited_ns
    from counted
    cross join steps s
    group by rank
)
select
    r.*,
    r.last > r.expected_last + 3 * sqrt(r.expected_variance) and r.last >= 1.5 * r.expected_last as stands_out
from ranked r
order by rank
