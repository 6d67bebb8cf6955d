-- What the ranks of each group sent each other, by the columns that decide between whom.
--
-- Input:  operations (see operations.sql)
-- Output: one row per combination. flow_bytes / wire_ranks is what all ranks of the group sent together: wire_share / wire_ranks
--         of operations.sql is the mean of a rank, and a message is sent by one rank alone. executed_bytes / wire_ranks is the
--         same of what the backend runs, where unexecuted, the operations of which that is not known, is 0.
-- The columns to group by are put in, each followed by a comma, the first and the last step, and how often an operation counts.
select
    {by}
    attempt,
    op,
    group_ranks,
    wire_ranks,
    root,
    sender,
    receiver,
    backend,
    call_bytes,
    sum(collectives * {weight}) as collectives,
    sum(payload_bytes * {weight}) as payload_bytes,
    sum(padding_bytes * {weight}) as padding_bytes,
    sum(cast(wire_share as decimal(38, 0)) * case when op = 'send' then 1 else group_size end * {weight}) as flow_bytes,
    sum(cast(executed_share as decimal(38, 0)) * case when op = 'send' then 1 else group_size end * {weight})
        as executed_bytes,
    sum(unexecuted) as unexecuted
from operations
where (collectives > 0 or wire_share > 0) and step between {first} and {last}
group by {by} attempt, op, group_ranks, wire_ranks, root, sender, receiver, backend, call_bytes
order by {by} attempt, op, group_ranks, wire_ranks, root, sender, receiver, backend, call_bytes
