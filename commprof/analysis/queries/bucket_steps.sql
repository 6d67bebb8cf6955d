-- The gradient buckets of each step added up, by why they were sent.
--
-- Input: bucket_flushes (the answer of that name)
-- What of a bucket the backend runs is put in, and the columns to tell steps apart by, each followed by a comma.
select
    {by}
    step,
    flush_reason,
    count(*) as buckets,
    cast(sum(bytes) as bigint) as bytes,
    cast(sum(collectives) as bigint) as collectives,
    cast(sum(payload_bytes) as bigint) as payload_bytes,
    cast(sum(padding_bytes) as bigint) as padding_bytes,
    sum(wire_bytes) as wire_bytes,
    case when count(*) = count({executed}) then sum({executed}) end as executed_wire_bytes,
    case when count(*) = count(between_hosts_bytes) then sum(between_hosts_bytes) end as between_hosts_bytes,
    cast(sum(case when alike then 0 else 1 end) as bigint) as unlike,
    min(micro_step) as first_micro_step,
    max(micro_step) as last_micro_step
from bucket_flushes
group by {by} step, flush_reason
order by {by} step, flush_reason
