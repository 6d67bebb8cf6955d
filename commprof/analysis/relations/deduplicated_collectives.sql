-- Deduplicated collectives. Each collective is derived from the records of all its ranks.
--
-- grain: one row per collective
-- inputs: members=collective_members
-- Some values must be equal on all ranks. These values are taken from the lowest rank that recorded
-- the collective. A collective has a tag if the record of any rank has the tag. The column
-- has_splits is 1 for an all_to_all if any rank recorded splits.
select
    attempt,
    pg,
    group_ranks,
    pg_seq,
    repetition,
    min_by(step, rank) as step,
    max(after_step) as after_step,
    min_by(micro_step, rank) as micro_step,
    min_by(phase, rank) as phase,
    min_by(op, rank) as op,
    max(intended_op) as intended_op,
    max(purpose) as purpose,
    max(bucket) as bucket,
    max(owner) as owner,
    max(dtype) as dtype,
    max(reduce_op) as reduce_op,
    max(backend) as backend,
    min_by(device, case when device is not null then rank end) as device,
    max(group_desc) as group_desc,
    max(group_size) as group_size,
    min_by(api, case when api is not null then rank end) as api,
    min_by(call_site, case when call_site is not null then rank end) as call_site,
    min_by(peer, rank) as root,
    count(*) as records,
    max(num_tensors) as tensors,
    max(padding_bytes) as padding_bytes,
    cast(case
        when min_by(op, rank) = 'all_to_all' then round(avg(cast(payload_bytes as double)))
        else max(payload_bytes)
    end as bigint) as payload_bytes,
    avg(cast(return_ns - issue_ns as double)) as host_ns,
    avg(cast(exposed_ns as double)) as exposed_ns,
    count(exposed_ns) as timed,
    max(case
        when op = 'all_to_all' and (input_splits is not null or output_splits is not null) then 1
        else 0
    end) as has_splits
from members
group by attempt, pg, group_ranks, pg_seq, repetition
