-- Whether the ranks of a group agree on what they issued.
--
-- grain: one row per combination of the requested columns
-- inputs: rank_operations
-- A row stands for the collectives of a group that have the same values of the requested columns. The
-- column agree is 1 if every rank of the group issued the same of these collectives, and with the same
-- padding. In this case the collectives of one rank represent
-- the collectives of the group. If the ranks issued different collectives, or if a rank has no
-- record, agree is 0. It is also 0 in three cases in which the individual records are needed. In the
-- first case, only some of the records of a rank contain times. In the second case, unequal splits
-- are recorded. In the third case, the pg_seq values of a rank in the group have a gap or a
-- repetition. The values repeat if a later group has
-- the same name, because the numbers of the later group begin again at 0. Collectives with the same
-- pg_seq are paired by the order of their records.
with numbered as (
    select
        attempt,
        pg,
        group_ranks,
        rank,
        max(ranks) as ranks,
        case
            when sum(calls) = max(last_seq) - min(first_seq) + 1
                and 2 * sum(sum_seq) = (max(last_seq) + min(first_seq)) * sum(calls)
            then 1
            else 0
        end as complete
    from rank_operations
    group by attempt, pg, group_ranks, rank
),
members as (
    select attempt, pg, group_ranks, sum(ranks) as ranks, min(complete) as complete
    from numbered
    group by attempt, pg, group_ranks
),
compared as (
    select
        {by}
        sum(ranks) as ranks,
        min(calls) as collectives,
        cast(sum(ranks * calls) as bigint) as records,
        max(payload_bytes) as payload_bytes,
        max(tensors) as tensors,
        max(padding_bytes) as padding_bytes,
        sum(case when returned > 0 then host_ns end) / sum(case when returned > 0 then ranks end) as host_ns,
        sum(case when timed > 0 then exposed_ns end) / sum(case when timed > 0 then ranks end) as exposed_ns,
        cast(sum(ranks * timed) as bigint) as timed,
        case
            when min(calls) = max(calls)
                and min(payload_bytes) = max(payload_bytes)
                and min(check_sum) = max(check_sum)
                and min(check_squares) = max(check_squares)
                and min(coalesce(padding_bytes, -1)) = max(coalesce(padding_bytes, -1))
                and max(splits) = 0
                and max(case when returned in (0, calls) and timed in (0, calls) then 0 else 1 end) = 0
            then 1
            else 0
        end as equal
    from rank_operations
    group by {by} 1 + 0
)
select
    {by_of_c}
    c.collectives,
    c.records,
    c.payload_bytes,
    c.tensors,
    c.padding_bytes,
    c.host_ns,
    c.exposed_ns,
    c.timed,
    case when c.equal = 1 and c.ranks = m.ranks and m.complete = 1 then 1 else 0 end as agree
from compared c
join members m on m.attempt = c.attempt and m.pg = c.pg and m.group_ranks = c.group_ranks
