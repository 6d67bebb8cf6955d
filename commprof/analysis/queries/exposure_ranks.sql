-- How many ranks have part in each combination of the grouping columns, whatever the step.
--
-- Input: counts (see exposure_counts.sql, by these columns at least)
-- Put in: the columns to group by without step, each followed by a comma.
select {partition} count(distinct member) as ranks
from counts
group by {partition} 1 + 0
