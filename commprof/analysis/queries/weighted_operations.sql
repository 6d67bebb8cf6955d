-- The operations that a mean training step is made of, each as often as it counts in it.
--
-- Input: operations (see operations.sql), weights (of each step, by what commprof.analysis.time.training_steps tells apart)
select
    o.attempt,
    o.step,
    o.op,
    o.purpose,
    o.group_ranks,
    o.group_size,
    o.backend,
    o.call_bytes,
    o.root,
    o.sender,
    o.receiver,
    o.wire_ranks,
    o.collectives * w.weight as collectives,
    o.payload_bytes * w.weight as payload_bytes,
    o.padding_bytes * w.weight as padding_bytes,
    cast(o.wire_share as double) * w.weight as wire_share,
    cast(o.executed_share as double) * w.weight as executed_share,
    o.unexecuted
from operations o
join weights w
    on w.attempt = o.attempt
    and w.step = o.step
    and w.op = o.op
    and w.group_size = o.group_size
    and w.intended_op is not distinct from o.intended_op
    and w.purpose is not distinct from o.purpose
    and w.group_desc is not distinct from o.group_desc
