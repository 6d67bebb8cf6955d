-- The operations that each rank issued, summed for each combination of the columns of an operation.
--
-- grain: one row per combination of the requested columns, attempt, pg, group_ranks, group_size, op, backend, call_bytes
--   and rank
-- inputs: collectives
-- Messages (send, recv) are excluded. The column ranks is the number of ranks that a row
-- represents. In this relation it is always 1. It can be larger in host_operations, which merges
-- the ranks of a host.
--
-- The columns check_sum and check_squares depend on pg_seq, payload_bytes and num_tensors of every
-- record. They do not depend on the order of the records. Two ranks issued the same collectives if
-- their calls, payload_bytes, check_sum and check_squares are equal. The probability that a
-- different multiset of collectives has the same sums is below 1e-18. The terms of the
-- sums are computed modulo the prime 2147483647, so that every product fits into 64 bits.
with described as (
    select
        *,
        peer as root,
        case when op = 'reduce' and backend = 'gloo' then payload_bytes end as call_bytes,
        return_ns - issue_ns as call_ns,
        (
            (pg_seq % 2147483647 + 2147483647) % 2147483647 * 1103515245
            + payload_bytes % 2147483647 * 69069
            + num_tensors * 40503
        ) % 2147483647 as mixed
    from collectives
    where op not in ('send', 'recv')
)
select
    {by}
    rank,
    cast(1 as int) as ranks,
    count(*) as calls,
    cast(sum(payload_bytes) as bigint) as payload_bytes,
    cast(sum(num_tensors) as bigint) as tensors,
    cast(sum(padding_bytes) as bigint) as padding_bytes,
    cast(sum(mixed) as bigint) as check_sum,
    cast(sum(mixed * mixed % 2147483647) as bigint) as check_squares,
    min(pg_seq) as first_seq,
    max(pg_seq) as last_seq,
    cast(sum(pg_seq) as bigint) as sum_seq,
    count(input_splits) + count(output_splits) as splits,
    count(call_ns) as returned,
    sum(cast(call_ns as double)) as host_ns,
    count(exposed_ns) as timed,
    sum(cast(exposed_ns as double)) as exposed_ns
from described
group by {by} rank
