-- The records of collectives on which the ranks of a group differ, or whose splits are recorded.
--
-- grain: one row per record
-- inputs: collectives, agreement
-- The relation contains the records of all ranks of such a collective. Suppose that
-- the collective has one combination of values on one rank and another combination on the other ranks.
-- Then agree is 0 for both combinations, so the records of all ranks are selected.
with described as (
    select
        *,
        peer as root,
        case when op = 'reduce' and backend = 'gloo' then payload_bytes end as call_bytes
    from collectives
    where op not in ('send', 'recv')
),
differing as (
    select * from agreement where agree = 0
)
select d.*
from described d
join differing a on {same_in_d_and_a}
