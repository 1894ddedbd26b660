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
HOST := $(shell rustc -vV | sed -n 's/^host: //p')

.PHONY: demo test bench lint soak sanitize clean

demo: ## train a small network on four ranks of two nodes, all on this machine
	$(TORCH) $(CARGO) build --release -p gradwire-cli -p gradwire-daemon --bins
	$(TORCH) $(CARGO) build --release -p gradwire-worker --features tch --example digits
	$(TORCH) target/release/gradwire run -np 4 -H $(DEMO_HOSTS) -- target/release/examples/digits $(DEMO_ARGS)

test: ## every test, on a fresh machine too
	$(TORCH) $(CARGO) build --workspace --bins
	$(TORCH) $(CARGO) build -p gradwire-worker --features tch --examples
	cd scripts/bench && python3 -m unittest discover .
ifeq ($(NEXTEST),yes)
	$(TORCH) $(CARGO) nextest run -p gradwire-worker --features tch
	$(TORCH) $(CARGO) nextest run --workspace
else
	$(TORCH) $(CARGO) test -p gradwire-worker --features tch
	$(TORCH) $(CARGO) test --workspace
endif

bench: ## Gradwire and its peers (Gloo, Open MPI, …) side by side; BENCH_ARGS=--quick for five minutes
	scripts/bench/run.py $(BENCH_ARGS)

lint: ## what CI wants besides the tests
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(TORCH) $(CARGO) clippy -p gradwire-worker --features tch --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	test -x .venv-lint/bin/ruff || (python3 -m venv .venv-lint && .venv-lint/bin/pip install --quiet ruff==$(RUFF))
	.venv-lint/bin/ruff check scripts
	.venv-lint/bin/ruff format --check scripts

soak: ## the property tests for as long as one likes: make soak CASES=5000
	PROPTEST_CASES=$(CASES) $(CARGO) test --release -p gradwire-daemon every_algorithm
	PROPTEST_CASES=$(CASES) $(CARGO) test --release -p gradwire-tests --test random_jobs

sanitize: ## the rooms with unsafe code under the address sanitizer, where there is a nightly toolchain
	RUSTFLAGS=-Zsanitizer=address RUSTDOCFLAGS=-Zsanitizer=address $(CARGO) +nightly test \
	    --target $(HOST) -p gradwire-shm -p gradwire-collectives --lib --tests

clean: ## everything that was built or fetched here
	$(CARGO) clean
	rm -rf .venv .venv-bench .venv-lint
