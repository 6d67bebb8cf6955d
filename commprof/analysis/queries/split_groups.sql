-- The groups with an all_to_all whose splits are recorded.
--
-- Input: collectives
select group_ranks
from collectives
where op = 'all_to_all' and (input_splits is not null or output_splits is not null)
group by group_ranks
