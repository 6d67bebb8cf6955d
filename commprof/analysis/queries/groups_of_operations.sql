-- The groups whose ranks issued anything.
--
-- Input: collectives, aggregates
select group_ranks
from collectives
union
select group_ranks
from aggregates
