"""commprof: records every collective of a training job, and explains it.

Most people need only the command line (``commprof run train.py``). A program that wants to say more
about itself imports the hooks; they cost one flag test while nothing is recording::

    import commprof

    commprof.step(7)
    with commprof.tag("gradient_reduce", bucket=3):
        torch.distributed.all_reduce(bucket)
    commprof.metric("loss", 2.31)
"""

from commprof.hooks import attach, detach, metric, phase, recording, step, tag

__version__ = "0.1.0"

__all__ = ["__version__", "attach", "detach", "metric", "phase", "recording", "step", "tag"]
