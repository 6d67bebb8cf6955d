"""One Spark session for all tests of a process: its JVM takes seconds to start."""

import importlib.util
from functools import cache
from typing import Any

import pytest

# Small tables: one partition, and plans that are interpreted, as to compile them takes longer than to run them.
SETTINGS = {
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.memory": "1g",
    # The JVM does not live long enough for what its second compiler costs: half of its processor time.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def session() -> Any:
    """The session; the test is skipped, with one line, where there can be none."""
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
