"""The machine's own ceiling: collectives timed over a range of sizes, latency and bandwidth fitted to the times."""
