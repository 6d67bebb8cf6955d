-- Tokens that chose each expert in each training step, by the rank that has the expert.
--
-- holder is null where the rank did not publish its layers. Forward passes that activation checkpointing repeats in a backward
-- pass are left out: their tokens are counted already. highest is the largest count of one pass, relative to an even choice:
-- with a capacity factor of that size no token is dropped.
with layers as (
    select
        attempt,
        rank,
        layer,
        max(num_experts) as num_experts,
        max(ep_size) as ep_size,
        max(k) as k,
        max(expert_ranks) as expert_ranks
    from expert_layers
    where num_experts > 0 and ep_size > 0 and k > 0
    group by attempt, rank, layer
),
training as (
    select *
    from expert_loads
    where step >= 0 and phase not in ('backward', 'evaluation', 'checkpoint', 'optimizer')
)
select
    t.attempt,
    t.step,
    t.layer,
    t.expert,
    try_cast(
        split_part(l.expert_ranks, ',', cast(floor(t.expert * l.ep_size / cast(l.num_experts as double)) as int) + 1) as int
    ) as holder,
    cast(sum(t.tokens) as bigint) as tokens,
    cast(sum(t.dropped) as bigint) as dropped,
    cast(sum(t.sent) as bigint) as seen,
    cast(count(*) as bigint) as passes,
    max(case when t.sent > 0 then t.tokens * cast(l.num_experts as double) / t.sent / l.k end) as highest
from training t
left join layers l on l.attempt = t.attempt and l.rank = t.rank and l.layer = t.layer
group by t.attempt, t.step, t.layer, t.expert, holder
order by t.attempt, t.step, t.layer, t.expert, holder
