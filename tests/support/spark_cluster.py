"""Runs a Spark standalone cluster on this machine: a master and workers, each with its own executors."""

from __future__ import annotations

import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from headrace.devstack.errors import LocalStackError
from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.server import LOOPBACK, Server, Startable, free_port


class SparkMaster(Server):
    """The master; after a crash it recovers its workers and applications from its folder."""

    name = "spark-master"

    def __init__(self, folder: Path, *, conf_dir: Path, port: int | None = None, web_port: int | None = None) -> None:
        super().__init__(folder)
        self.conf_dir = conf_dir
        self.port = port or free_port()
        self.web_port = web_port or free_port({self.port})

    @property
    def url(self) -> str:
        """What Spark's clients want as `spark.master`."""
        return f"spark://{LOOPBACK}:{self.port}"

    def specify(self) -> ProcessSpec:
        recovery = self.folder / "recovery"
        recovery.mkdir(exist_ok=True)
        options = f"-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryDirectory={recovery}"
        argv = [_spark_class(), "org.apache.spark.deploy.master.Master", "--host", LOOPBACK]
        argv += ["--port", str(self.port), "--webui-port", str(self.web_port)]
        return ProcessSpec(
            name=self.name,
            argv=argv,
            env=_environment(self.conf_dir) | {"SPARK_MASTER_OPTS": options},
            cwd=self.folder,
            log=self.log,
        )

    def probe(self) -> None:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self.web_port}/json/", timeout=2):
            pass


class SparkWorker(Server):
    """A worker of ``master`` with ``cores`` and ``memory`` (in Spark's notation) for executors."""

    def __init__(self, folder: Path, name: str, master: SparkMaster, *, cores: int, memory: str) -> None:
        super().__init__(folder)
        self.name = name
        self.web_port = free_port({master.port, master.web_port})
        self._master = master
        self._cores = cores
        self._memory = memory

    def specify(self) -> ProcessSpec:
        argv = [_spark_class(), "org.apache.spark.deploy.worker.Worker", "--host", LOOPBACK]
        argv += ["--webui-port", str(self.web_port), "--cores", str(self._cores), "--memory", self._memory]
        argv += ["--work-dir", str(self.folder / "work"), self._master.url]
        env = _environment(self._master.conf_dir)
        return ProcessSpec(name=self.name, argv=argv, env=env, cwd=self.folder, log=self.log)

    def probe(self) -> None:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self.web_port}/json/", timeout=2):
            pass


class SparkCluster(Startable):
    """A master and ``workers`` workers in ``folder``; started on entering, stopped on leaving.

    With a ``secret`` it accepts only applications that have it (``spark.authenticate``), and encrypts its network
    traffic. Such an application is started with ``SPARK_CONF_DIR`` set to ``conf_dir``, the cluster's settings.
    """

    def __init__(
        self, folder: Path, *, workers: int = 2, cores: int = 2, memory: str = "1g", secret: str | None = None
    ) -> None:
        self._secret = secret
        self.conf_dir = folder / "conf"
        self.master = SparkMaster(folder / "master", conf_dir=self.conf_dir)
        names = [f"spark-worker-{number}" for number in range(workers)]
        self.workers: dict[str, Server] = {
            name: SparkWorker(folder / name, name, self.master, cores=cores, memory=memory) for name in names
        }

    @property
    def url(self) -> str:
        """What Spark's clients want as `spark.master`."""
        return self.master.url

    @property
    def servers(self) -> dict[str, Server]:
        """The master and the workers, by name."""
        return {self.master.name: self.master, **self.workers}

    def start(self) -> Self:
        """Start all; returns when each answers."""
        self.conf_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # By default executors' logs grow without a bound. The worker writes them.
        settings = {
            "spark.executor.logs.rolling.strategy": "size",
            "spark.executor.logs.rolling.maxSize": str(16 << 20),
            "spark.executor.logs.rolling.maxRetainedFiles": "4",
        }
        if self._secret is not None:
            # In the file, because every user of the machine could read it on a command line.
            settings |= {
                "spark.authenticate": "true",
                "spark.authenticate.secret": self._secret,
                "spark.network.crypto.enabled": "true",
            }
        text = "".join(f"{name} {value}\n" for name, value in settings.items())
        (self.conf_dir / "spark-defaults.conf").write_text(text)
        try:
            for server in self.servers.values():
                server.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all, with their executors."""
        for server in reversed(self.servers.values()):
            server.stop()


def _spark_class() -> str:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise LocalStackError("pyspark is not installed here.")
    return str(Path(spec.origin).parent / "bin" / "spark-class")


def _environment(conf_dir: Path) -> dict[str, str]:
    own = {"SPARK_LOCAL_IP": LOOPBACK, "PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "256m"}
    return child_environment(own | {"SPARK_CONF_DIR": str(conf_dir)})
