-- Flows of bytes: what the ranks of each group sent each other, by the columns that decide between whom.
--
-- Input:  operations (see operations.sql)
-- Output: one row per combination. executed_bytes is what all ranks of the group sent together by what the backend runs, if
--         unexecuted (operations for which that is not known) is 0: executed_share / wire_ranks of operations.sql is the
--         mean of a rank, and only one rank sends a message.
-- The columns to group by are put in, each followed by a comma.
select
    {by}
    op,
    group_ranks,
    root,
    backend,
    call_bytes,
    sum(collectives) as collectives,
    sum(payload_bytes) as payload_bytes,
    sum(padding_bytes) as padding_bytes,
    sum(cast(executed_share as double) * case when op = 'send' then 1 else group_size end / wire_ranks) as executed_bytes,
    sum(unexecuted) as unexecuted
from operations
where wire_share > 0
group by {by} op, group_ranks, root, backend, call_bytes
order by {by} op, group_ranks, root, backend, call_bytes
