-- The records of some training steps.
--
-- Input: collectives
select * from collectives where step between {first} and {last}
