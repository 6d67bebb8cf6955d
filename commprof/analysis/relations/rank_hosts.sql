-- The host of each rank.
--
-- grain: one row per attempt and rank whose host is known
-- inputs: groups
select attempt, rank, min(host) as host
from groups
where host is not null
group by attempt, rank
