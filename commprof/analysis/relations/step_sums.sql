-- The training steps, with sums over the ranks.
--
-- grain: one row per attempt and step; initialization is not a step
-- inputs: steps
-- Rows of the same step that come from different sets of ranks can be combined further. The column
-- longest_ns is the longest duration of the step on any rank. The columns begin_ns and last_ns are
-- the beginning and the end of the step on the lowest rank. The column rank contains this rank. The
-- times of other ranks are not used, because hosts do not share a clock. The column last_ns is -1
-- if the lowest rank did not end the step. The column processes counts all processes of the step,
-- and ended counts the processes that ended the step. The columns loss, grad_norm and cpu_ns are
-- sums. The columns losses, grad_norms and cpus contain the number of values in these sums.
select
    attempt,
    step,
    min(rank) as rank,
    cast(count(distinct rank) as int) as ranks,
    cast(count(*) as int) as processes,
    cast(count(end_ns) as int) as ended,
    max_by(begin_ns, -(rank * cast(4294967296 as bigint) + pid)) as begin_ns,
    max_by(case when end_ns is null then -1 else end_ns end, -(rank * cast(4294967296 as bigint) + pid)) as last_ns,
    max(end_ns - begin_ns - coalesce(outside_ns, 0)) as longest_ns,
    max(micro_steps) as micro_steps,
    sum(loss) as loss,
    cast(count(loss) as int) as losses,
    sum(grad_norm) as grad_norm,
    cast(count(grad_norm) as int) as grad_norms,
    max(loss_scale) as loss_scale,
    cast(sum(samples) as bigint) as samples,
    cast(sum(cpu_ns) as bigint) as cpu_ns,
    cast(count(cpu_ns) as int) as cpus,
    max(rss_bytes) as rss_bytes,
    max(device_bytes) as device_bytes
from steps
where step >= 0
group by attempt, step
