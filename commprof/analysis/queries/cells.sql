-- The relation matrix by blocks of ranks, named by their first rank; sender and receiver are null if not known.
--
-- Input: matrix, blocks (rank, first)
-- by: the columns to group by, each followed by a comma. unlocated: pairs of ranks with an unknown host.
select
    {by}
    s.first as sender,
    r.first as receiver,
    sum(m.wire_bytes) as wire_bytes,
    cast(sum(m.message_bytes) as bigint) as message_bytes,
    sum(m.alike_bytes) as alike_bytes,
    sum(m.between_hosts_bytes) as between_hosts_bytes,
    count(*) - count(m.between_hosts_bytes) as unlocated
from matrix m
left join blocks s on s.rank = m.sender
left join blocks r on r.rank = m.receiver
group by {by} s.first, r.first
