-- repetitions.sql of records among which no rank gave a number twice in a group.
--
-- Input: collectives
select c.*, 1 as repetition
from collectives c
where c.op not in ('send', 'recv')
