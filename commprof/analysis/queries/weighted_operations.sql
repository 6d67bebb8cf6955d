-- The operations that a mean training step is made of, and how often each of them counts in it.
--
-- Input: operations (see operations.sql), weights (of each step, by what commprof.analysis.steps tells apart)
select o.*, w.weight
from operations o
join weights w
    on w.attempt = o.attempt
    and w.step = o.step
    and w.op = o.op
    and w.group_size = o.group_size
    and w.intended_op is not distinct from o.intended_op
    and w.purpose is not distinct from o.purpose
    and w.group_desc is not distinct from o.group_desc
