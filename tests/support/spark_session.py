"""One Spark session for all tests of a process, because its JVM takes seconds to start."""

import importlib.util
from functools import cache
from typing import Any

import pytest

# The tables are small. So there is one partition, and plans are interpreted, because compiling a plan takes longer
# than running it.
SETTINGS = {
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.memory": "1g",
    # The second compiler takes half of the processor time of the JVM, which exits before this cost pays off.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def session() -> Any:
    """Return the session, or skip the test with the reason why there is no session."""
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("pyspark is not installed: pip install 'commprof[spark]'")
    from commprof.analysis.relations import spark

    if not spark.has_java():
        pytest.skip("no Java, which Spark needs: apt-get install openjdk-17-jre-headless")
    return _started()


@cache
def _started() -> Any:
    from commprof.analysis.relations import spark

    return spark.start("local[2]", SETTINGS)
