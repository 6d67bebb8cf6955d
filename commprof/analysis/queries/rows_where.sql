-- The rows of a table in which some columns of numbers have certain values.
--
-- Input: given (any table of the schema)
-- The names of its columns, and the condition, are put in.
select {columns}
from given
where {condition}
