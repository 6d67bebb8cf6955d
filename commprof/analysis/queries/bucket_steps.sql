-- The gradient buckets of each step added up, by why they were sent.
--
-- Input: bucket_flushes (the answer of that name)
select
    step,
    flush_reason,
    count(*) as buckets,
    cast(sum(bytes) as bigint) as bytes,
    cast(sum(collectives) as bigint) as collectives,
    sum(wire_bytes) as wire_bytes,
    cast(sum(case when alike then 0 else 1 end) as bigint) as unlike,
    min(micro_step) as first_micro_step,
    max(micro_step) as last_micro_step
from bucket_flushes
group by step, flush_reason
order by step, flush_reason
