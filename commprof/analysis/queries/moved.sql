-- What the counters of each host and interface moved between the first and the last reading.
--
-- Input: wire
-- A counter that went down began anew: what it shows then was moved since.
-- Several processes of a host read its counters, and two readings at nearly one moment may stand in the wrong order,
-- which would look like a counter that began anew. So what lies below a reading of the 50 ms before it is left out.
with newest as (
    select
        *,
        max(sent_bytes) over (
            partition by host, kind, device order by time_ns range between 50000000 preceding and current row
        ) as most_sent,
        max(received_bytes) over (
            partition by host, kind, device order by time_ns range between 50000000 preceding and current row
        ) as most_received
    from wire
),
taken as (
    select *
    from newest
    where sent_bytes = most_sent and received_bytes = most_received
),
readings as (
    select
        host,
        kind,
        device,
        time_ns,
        sent_bytes,
        received_bytes,
        lag(sent_bytes) over (partition by host, kind, device order by time_ns) as sent_before,
        lag(received_bytes) over (partition by host, kind, device order by time_ns) as received_before
    from taken
)
select
    host,
    kind,
    device,
    cast(sum(case
        when sent_before is null then 0
        when sent_bytes >= sent_before then sent_bytes - sent_before
        else sent_bytes
    end) as bigint) as sent_bytes,
    cast(sum(case
        when received_before is null then 0
        when received_bytes >= received_before then received_bytes - received_before
        else received_bytes
    end) as bigint) as received_bytes,
    cast(max(time_ns) - min(time_ns) as double) / 1000000000.0 as seconds,
    cast(count(*) as bigint) as readings
from readings
group by host, kind, device
order by host, kind, device
