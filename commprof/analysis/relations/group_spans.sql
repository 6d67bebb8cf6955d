-- The span of each group, which tells whether its ranks are on one host or on several hosts.
--
-- grain: one row per attempt and value of group_ranks
-- inputs: groups, rank_hosts
-- The column span is within_host if all ranks of the group were recorded on one host. It is
-- between_hosts if two ranks of the group were recorded on different hosts. In all other cases the
-- span is null, because the host of at least one rank is not known.
with members as (
    select attempt, group_ranks, rank, max(group_size) as group_size
    from groups
    group by attempt, group_ranks, rank
)
select
    m.attempt,
    m.group_ranks,
    case
        when count(distinct h.host) > 1 then 'between_hosts'
        when count(h.host) = max(m.group_size) then 'within_host'
    end as span
from members m
left join rank_hosts h on h.attempt = m.attempt and h.rank = m.rank
group by m.attempt, m.group_ranks
