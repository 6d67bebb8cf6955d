-- The bytes that each rank sends to each other rank in an all_to_all with recorded splits.
--
-- grain: one row per collective, sender and receiver; the sender may be the receiver
-- inputs: members=collective_members, group_members
-- A rank without recorded input_splits sends the same number of bytes to every rank. If the
-- sender's record does not contain the bytes, they are taken from the receiver's record. The column
-- sent_bytes is null if neither record contains the bytes. A collective has no rows at all if the
-- record of any of its ranks is missing.
with with_splits as (
    select attempt, pg, group_ranks, pg_seq, repetition
    from members
    where op = 'all_to_all' and (input_splits is not null or output_splits is not null)
    group by attempt, pg, group_ranks, pg_seq, repetition
),
sizes as (
    select group_ranks, count(*) as ranks from group_members group by group_ranks
),
placed as (
    select n.*, m.position, s.ranks
    from members n
    join with_splits w
        on w.attempt = n.attempt
        and w.pg = n.pg
        and w.group_ranks = n.group_ranks
        and w.pg_seq = n.pg_seq
        and w.repetition = n.repetition
    join group_members m on m.group_ranks = n.group_ranks and m.rank = n.rank
    join sizes s on s.group_ranks = n.group_ranks
),
whole as (
    select attempt, pg, group_ranks, pg_seq, repetition
    from placed
    group by attempt, pg, group_ranks, pg_seq, repetition
    having count(*) = max(ranks)
),
texts as (
    select input_splits as text, group_ranks from placed where input_splits is not null
    union
    select output_splits as text, group_ranks from placed where output_splits is not null
),
parts as (
    select
        t.text,
        t.group_ranks,
        m.position,
        try_cast(split_part(t.text, ',', m.position + 1) as bigint) as bytes
    from texts t
    join group_members m on m.group_ranks = t.group_ranks
    join sizes s on s.group_ranks = t.group_ranks
    where length(t.text) - length(replace(t.text, ',', '')) = s.ranks - 1
),
readable as (
    select text, group_ranks
    from parts
    group by text, group_ranks
    having min(case when bytes >= 0 then 1 else 0 end) = 1
),
known as (
    select p.*
    from parts p
    join readable r on r.text = p.text and r.group_ranks = p.group_ranks
)
select
    s.attempt,
    s.pg,
    s.group_ranks,
    s.pg_seq,
    s.repetition,
    s.rank as sender,
    r.rank as receiver,
    coalesce(
        case when s.input_splits is null then s.payload_bytes / cast(s.ranks as double) else cast(i.bytes as double) end,
        cast(o.bytes as double)
    ) as sent_bytes
from placed s
join whole w
    on w.attempt = s.attempt
    and w.pg = s.pg
    and w.group_ranks = s.group_ranks
    and w.pg_seq = s.pg_seq
    and w.repetition = s.repetition
join placed r
    on r.attempt = s.attempt
    and r.pg = s.pg
    and r.group_ranks = s.group_ranks
    and r.pg_seq = s.pg_seq
    and r.repetition = s.repetition
left join known i on i.text = s.input_splits and i.group_ranks = s.group_ranks and i.position = r.position
left join known o on o.text = r.output_splits and o.group_ranks = s.group_ranks and o.position = s.position
