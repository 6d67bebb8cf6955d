-- The operations that the ranks of a host issued. This relation merges the rows of rank_operations
-- for ranks that issued the same operations.
--
-- grain: one row per combination of the requested columns, attempt, pg, group_ranks, group_size, op, backend and call_bytes,
--   and set of ranks
-- inputs: rank_operations
-- Ranks form a set if they have the same rows in a group. The column rank contains the lowest rank
-- of the set, and the column ranks contains the number of ranks in the set. The columns host_ns and
-- exposed_ns are sums over the set. Every other column contains the value of a single rank. If
-- agreement is computed from these merged rows, its result is the same as from the rows of the single
-- ranks. This holds for the merged rows of one host and of several hosts.
--
-- Usually all ranks of a group issued the same operations. In this case the rows of the group are
-- merged by a plain grouping. In all other groups the ranks are compared in pairs.
with alike as (
    select
        {by}
        calls,
        payload_bytes,
        tensors,
        padding_bytes,
        check_sum,
        check_squares,
        first_seq,
        last_seq,
        sum_seq,
        splits,
        returned,
        timed,
        min(rank) as rank,
        cast(count(*) as int) as ranks,
        sum(host_ns) as host_ns,
        sum(exposed_ns) as exposed_ns
    from rank_operations
    group by
        {by} calls, payload_bytes, tensors, padding_bytes, check_sum, check_squares, first_seq, last_seq, sum_seq, splits,
        returned, timed
),
members as (
    select attempt, pg, group_ranks, count(distinct rank) as members
    from rank_operations
    group by attempt, pg, group_ranks
),
groups_of_ranks as (
    select a.attempt, a.pg, a.group_ranks, case when min(a.ranks) = max(m.members) then 1 else 0 end as is_alike
    from alike a
    join members m on m.attempt = a.attempt and m.pg = a.pg and m.group_ranks = a.group_ranks
    group by a.attempt, a.pg, a.group_ranks
),
compared as (
    select
        r.*,
        min(rank) over (
            partition by {by} calls, payload_bytes, tensors, padding_bytes, check_sum, check_squares, first_seq, last_seq,
                sum_seq, splits, returned, timed
        ) as like_rank
    from (
        select c.*
        from rank_operations c
        join groups_of_ranks g
            on g.attempt = c.attempt and g.pg = c.pg and g.group_ranks = c.group_ranks and g.is_alike = 0
    ) r
),
numbered as (
    select
        attempt,
        pg,
        group_ranks,
        rank,
        count(*) as combinations,
        case when min(like_rank) = max(like_rank) then min(like_rank) else rank end as like_rank
    from compared
    group by attempt, pg, group_ranks, rank
),
sets as (
    select
        n.attempt,
        n.pg,
        n.group_ranks,
        n.rank,
        case when f.combinations = n.combinations then f.rank else n.rank end as first_rank
    from numbered n
    join numbered f
        on f.attempt = n.attempt and f.pg = n.pg and f.group_ranks = n.group_ranks and f.rank = n.like_rank
)
select
    {by_of_c}
    c.rank,
    c.ranks,
    c.calls,
    c.payload_bytes,
    c.tensors,
    c.padding_bytes,
    c.check_sum,
    c.check_squares,
    c.first_seq,
    c.last_seq,
    c.sum_seq,
    c.splits,
    c.returned,
    c.host_ns,
    c.timed,
    c.exposed_ns
from alike c
join groups_of_ranks g
    on g.attempt = c.attempt and g.pg = c.pg and g.group_ranks = c.group_ranks and g.is_alike = 1
union all
select
    {by_of_c}
    s.first_rank as rank,
    cast(count(*) as int) as ranks,
    max(c.calls) as calls,
    max(c.payload_bytes) as payload_bytes,
    max(c.tensors) as tensors,
    max(c.padding_bytes) as padding_bytes,
    max(c.check_sum) as check_sum,
    max(c.check_squares) as check_squares,
    max(c.first_seq) as first_seq,
    max(c.last_seq) as last_seq,
    max(c.sum_seq) as sum_seq,
    max(c.splits) as splits,
    max(c.returned) as returned,
    sum(c.host_ns) as host_ns,
    max(c.timed) as timed,
    sum(c.exposed_ns) as exposed_ns
from rank_operations c
join sets s on s.attempt = c.attempt and s.pg = c.pg and s.group_ranks = c.group_ranks and s.rank = c.rank
group by {by_of_c} s.first_rank
