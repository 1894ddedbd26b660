# The two commands that matter are `make demo` and `make test`; the rest is for those who work on
# Gradwire itself.

CARGO ?= cargo
# Where nextest is installed it runs the tests, side by side and each with a time limit.
NEXTEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo yes)
TORCH := torch=$$(scripts/libtorch.sh) && eval "$$torch" &&
DEMO_HOSTS ?= 127.0.0.1:2,127.0.0.2:2
DEMO_ARGS ?=
BENCH_ARGS ?=
CASES ?= 1000
RUFF := 0.17.5
MATURIN := 1.16.0
PDOC := 16.0.0
# One test more at a time than there are processors, because some wait.
AT_ONCE := $(shell expr $$(nproc) + 1)
PYTEST := -p no:cacheprovider -n $(AT_ONCE) --dist worksteal
STUBS := target/stubs/gradwire/_native.pyi
# What the wheel is built as: release, or dev as the tests are.
PROFILE ?= release
BUILT = $(or $(CARGO_TARGET_DIR),target)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
HOST := $(shell rustc -vV | sed -n 's/^host: //p')

.PHONY: demo demo-rust test wheel python-test python-oldest nightly bench bench-choice bench-cycles simulate-check bench-torch lint stubs \
    generated-stubs docs metrics-docs simulator-docs dashboards deploy-test soak sanitize clean

demo: ## a small PyTorch network trains on four ranks of two nodes, all on this machine
	@# PyTorch is fetched while Gradwire is built.
	python3 python/make_venv.py --without-tools & fetch=$$!; \
	$(MAKE) --no-print-directory wheel; built=$$?; wait $$fetch && exit $$built
	.venv-python/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps python/dist/gradwire-*.whl
	.venv-python/bin/gradwire run -H $(DEMO_HOSTS) -- .venv-python/bin/python examples/digits_horovod.py $(DEMO_ARGS)

demo-rust: ## the same in Rust: a trainer that is linked against libtorch
	$(TORCH) $(CARGO) build --release -p gradwire-cli -p gradwire-daemon --bins
	$(TORCH) $(CARGO) build --release -p gradwire-tch --example digits
	$(TORCH) $(BUILT)/gradwire run -H $(DEMO_HOSTS) -- $(BUILT)/examples/digits $(DEMO_ARGS)

test: ## every test, on a fresh machine too
	@# All of it in one go: fewer crates would need their dependencies with fewer features, so anew.
	$(TORCH) $(CARGO) build --workspace --bins --tests --examples
	cd lab/benchmarks && python3 -m unittest discover .
	cd scripts && python3 -m unittest discover .
	$(MAKE) deploy-test
	lab/docs_tables.py --check --without rat --without byteps $(or $(CARGO_TARGET_DIR),target)/debug/gradwire-lab
ifeq ($(NEXTEST),yes)
	$(TORCH) $(CARGO) nextest run --workspace --test-threads $(AT_ONCE)
else
	$(TORCH) $(CARGO) test --workspace
endif
	$(MAKE) python-test PROGRAMS=built

wheel: ## the Python package with its programs, in python/dist
	test -n "$(PROGRAMS)" || $(CARGO) build --profile $(PROFILE) --workspace --bins
	test -x .venv-lint/bin/maturin || (python3 -m venv .venv-lint && .venv-lint/bin/pip install --quiet maturin==$(MATURIN))
	rm -rf python/dist python/gradwire.data && mkdir -p python/gradwire.data/scripts
	for program in gradwire gradwired; do strip -o python/gradwire.data/scripts/$$program $(BUILT)/$$program; done
	.venv-lint/bin/maturin build --quiet --strip --profile $(PROFILE) -m python/Cargo.toml --out python/dist

stubs: generated-stubs ## python/gradwire/_native.pyi, from the Rust code
	cp $(STUBS) python/gradwire/_native.pyi

generated-stubs:
	test -x .venv-lint/bin/ruff || (python3 -m venv .venv-lint && .venv-lint/bin/pip install --quiet ruff==$(RUFF))
	test -x .venv-lint/bin/maturin || (python3 -m venv .venv-lint && .venv-lint/bin/pip install --quiet maturin==$(MATURIN))
	mkdir -p python/gradwire.data/scripts
	.venv-lint/bin/maturin generate-stubs --quiet --profile dev -m python/Cargo.toml --features stubs --out target/stubs
	.venv-lint/bin/ruff check --quiet --fix --select I,UP --config python/pyproject.toml $(STUBS)
	.venv-lint/bin/ruff format --quiet --config python/pyproject.toml $(STUBS)

metrics-docs: ## docs/metrics.md, from telemetry/src/catalog.rs
	@mkdir -p target
	$(CARGO) run --quiet -p gradwire-telemetry --example metrics_reference > target/metrics.md
	cp target/metrics.md docs/metrics.md

simulator-docs: ## the tables of the simulator in docs, from what it prints: minutes
	$(CARGO) build -p gradwire-lab
	lab/docs_tables.py $(or $(CARGO_TARGET_DIR),target)/debug/gradwire-lab

dashboards: ## the dashboards for Grafana in deploy/grafana/dashboards, from the scripts beside them
	python3 python/make_venv.py
	.venv-python/bin/python deploy/grafana/generate.py

deploy-test: ## the configuration and the rules for Prometheus, with Debian's promtool where it can be had
	scripts/deploy-test.sh

docs: metrics-docs ## the reference of the Python package and of the crates, in target/docs
	$(MAKE) wheel PROFILE=dev
	python3 python/make_venv.py
	.venv-python/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps python/dist/gradwire-*.whl
	.venv-python/bin/pip install --quiet --disable-pip-version-check pdoc==$(PDOC)
	rm -rf target/docs && mkdir -p target/docs
	.venv-python/bin/python -W error::UserWarning -m pdoc --docformat google \
	    --output-directory target/docs/python gradwire gradwire.torch gradwire.torch.distributed
	$(TORCH) RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	cp -r $(or $(CARGO_TARGET_DIR),target)/doc target/docs/rust

python-test: ## the Python tests, with the wheel in a virtual environment
	$(MAKE) wheel PROFILE=dev
	$(MAKE) generated-stubs
	diff -u python/gradwire/_native.pyi $(STUBS) || (echo "run make stubs"; exit 1)
	python3 python/make_venv.py
	.venv-python/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps python/dist/gradwire-*.whl
	cd python/tests && ../../.venv-python/bin/pytest $(PYTEST)

python-oldest: ## all of them with the oldest PyTorch that it works with; python-test comes first
	python3 python/make_venv.py --torch 2.2.0 --folder .venv-python-oldest
	.venv-python-oldest/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps python/dist/gradwire-*.whl
	cd python/tests && ../../.venv-python-oldest/bin/pytest $(PYTEST)

nightly: export GWTEST_JOBS = all
nightly: ## every Python test on every kind of job and 500 random trainings, with the newest and with the oldest PyTorch
	$(MAKE) python-test
	$(MAKE) python-oldest

bench: ## Gradwire and its peers (Gloo, Open MPI, …) side by side; BENCH_ARGS=--quick for five minutes
	lab/benchmarks/run.py $(BENCH_ARGS)

bench-choice: ## how good the choice of algorithms is, on slow links of namespaces: an hour; BENCH_ARGS=--quick for five minutes
	$(CARGO) build --release -p gradwire-cli -p gradwire-daemon -p gradwire-lab
	lab/benchmarks/choice.py $(or $(CARGO_TARGET_DIR),target)/release/gradwire $(BENCH_ARGS)

simulate-check: ## how well the simulator tells times, on the same links: hours; BENCH_ARGS=--quick for five minutes, "--only '4 nodes, 1' --json FILE" for a part
	$(CARGO) build --release -p gradwire-cli -p gradwire-daemon -p gradwire-lab
	lab/benchmarks/simulate_check.py $(or $(CARGO_TARGET_DIR),target)/release/gradwire $(BENCH_ARGS)

bench-cycles: ## what a byte between nodes costs the processor, by what the lanes do: two minutes
	$(CARGO) build --release -p gradwire-cli -p gradwire-daemon -p gradwire-lab
	lab/benchmarks/cycles.py $(or $(CARGO_TARGET_DIR),target)/release/gradwire $(BENCH_ARGS)

bench-torch: wheel ## a step of ResNet-50 in PyTorch, with Gradwire and with DDP over Gloo in turn
	python3 python/make_venv.py
	.venv-python/bin/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target target/bench-torch python/dist/gradwire-*.whl
	lab/benchmarks/torch_model.py $(BENCH_ARGS)

lint: ## what CI wants besides the tests
	$(CARGO) fmt --all --check
	python3 scripts/check_text.py
	$(TORCH) $(CARGO) clippy --workspace --all-targets -- -D warnings
	$(TORCH) RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	test -x .venv-lint/bin/ruff || (python3 -m venv .venv-lint && .venv-lint/bin/pip install --quiet ruff==$(RUFF))
	.venv-lint/bin/ruff check lab scripts python examples deploy
	.venv-lint/bin/ruff format --check lab scripts python examples deploy
	python3 python/make_venv.py
	cd python && ../.venv-python/bin/python -m mypy

soak: ## the property tests, and calls that must leave nothing behind, for as long as one likes: make soak CASES=5000
	PROPTEST_CASES=$(CASES) $(CARGO) test --release -p gradwire-daemon every_algorithm
	PROPTEST_CASES=$(CASES) $(CARGO) test --release -p gradwire-tests --test system random_collectives::any_job
	PROPTEST_CASES=$$(($(CASES) / 20 + 1)) $(CARGO) test --release -p gradwire-tests --test system random_collectives::real
	$(CARGO) test --release -p gradwire-tests --test system large:: -- --include-ignored --test-threads=1
	$(CARGO) test --release -p gradwire-tests --test system network_matrix:: -- --include-ignored --test-threads=2
	GLIBC_TUNABLES=glibc.malloc.tcache_count=0 GRADWIRE_SOAK_CALLS=$$(($(CASES) * 200)) \
	    $(CARGO) test --release -p gradwire-tests --test soak -- --include-ignored --test-threads=1 --nocapture

sanitize: ## the crates with unsafe code under the address sanitizer, where there is a nightly toolchain
	RUSTFLAGS=-Zsanitizer=address RUSTDOCFLAGS=-Zsanitizer=address $(CARGO) +nightly test \
	    --target $(HOST) -p gradwire-shm -p gradwire-kernels --lib --tests

clean: ## everything that was built or fetched here
	$(CARGO) clean
	rm -rf .venv .venv-bench .venv-lint .venv-python .venv-python-oldest python/dist python/gradwire.data
