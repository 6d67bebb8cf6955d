-- What the ranks of each group sent each other, by the columns that decide between whom.
--
-- Input:  operations (see operations.sql)
-- Output: one row per combination. flow_bytes / wire_ranks is what all ranks of the group sent together: wire_share / wire_ranks
--         of operations.sql is the mean of a rank, and a message is sent by one rank alone.
-- The columns to group by are put in, each followed by a comma, and the first and the last step.
select
    {by}
    op,
    group_ranks,
    wire_ranks,
    root,
    sender,
    receiver,
    sum(collectives) as collectives,
    sum(payload_bytes) as payload_bytes,
    sum(cast(wire_share as decimal(38, 0)) * case when op = 'send' then 1 else group_size end) as flow_bytes
from operations
where collectives > 0 and step between {first} and {last}
group by {by} op, group_ranks, wire_ranks, root, sender, receiver
order by {by} op, group_ranks, wire_ranks, root, sender, receiver
