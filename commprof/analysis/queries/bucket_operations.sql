-- The collectives that reduced one bucket, of the lowest rank of a group that issued any, in order of issue.
--
-- Input: collectives, members (the ranks of the group)
-- Attempt, step, micro-batch and number of the bucket are put in as numbers.
with reducing as (
    select
        *,
        min(rank) over () as lowest_rank
    from collectives
    where attempt = {attempt} and step = {step} and micro_step = {micro_step} and bucket = {bucket}
        and purpose = 'gradient_reduce' and rank in (select rank from members)
)
select
    rank,
    pid,
    seq,
    op,
    intended_op,
    owner,
    dtype,
    reduce_op,
    numel,
    payload_bytes,
    padding_bytes,
    pg,
    group_ranks,
    module,
    issue_ns,
    greatest(
        issue_ns, coalesce(return_ns, issue_ns), coalesce(wait_end_ns, issue_ns), coalesce(device_end_ns, issue_ns)
    ) - issue_ns as duration_ns,
    exposed_ns
from reducing
where rank = lowest_rank
order by seq
