"""Settings that every test shares. Set before torch is imported anywhere."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks must not meet a parent's OpenMP pool
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COMMPROF_RUN"):
    os.environ.pop(name, None)

# A shell starts background jobs with SIGINT ignored, and programs started by tests would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
