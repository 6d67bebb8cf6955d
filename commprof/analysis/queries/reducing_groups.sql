-- The groups whose collectives reduce gradient buckets.
--
-- Input: collectives
select attempt, group_ranks
from collectives
where bucket is not null and purpose = 'gradient_reduce'
group by attempt, group_ranks
